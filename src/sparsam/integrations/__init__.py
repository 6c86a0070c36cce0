"""sparsam inside other people's trainers: Lightning and the Hugging Face Trainer. Each module needs its own extra."""
