"""Train with the Hugging Face Trainer and AdamW; `diff` with train_hf_sparsam.py shows what sparse SAM changes."""

import argparse
import tempfile

import torch
from train_plain import digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed


def vision_transformer():
    """Return a vision transformer for 8 x 8 pixels: 18,218 weights."""
    sizes = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    return ViTForImageClassification(
        ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **sizes)
    )


def collate(samples):
    """Return a batch as the model takes it."""
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.stack(labels)}


def build(args, folder):
    """Return the trainer."""
    set_seed(args.seed)
    train_set, test_set = digits(train=1297, seed=0)
    arguments = TrainingArguments(
        folder,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=3e-3,
        weight_decay=0.01,
        max_grad_norm=1.0,
        seed=args.seed,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        remove_unused_columns=False,
    )
    return Trainer(
        vision_transformer(),
        arguments,
        data_collator=collate,
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=lambda p: {"accuracy": 100 * (p.predictions.argmax(1) == p.label_ids).mean().item()},
    )


def main(arguments=None):
    """Train, print the test accuracy, and return the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="how often to go through the training data")
    parser.add_argument("--accumulate", type=int, default=2, help="over how many batches of 32 a step goes")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; the split is fixed")
    args = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as folder:
        trainer = build(args, folder)
        trainer.train()
        print(f"test accuracy {trainer.evaluate()['eval_accuracy']:.1f} %")
    return trainer


if __name__ == "__main__":
    main()
