"""Recipes: what is in them, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparsam.runs.recipe import RecipeError, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid(path):
    assert load_recipe(path).name == path.stem


# Section 5.1 of the paper and its appendix: lr, batch, epochs, weight decay, rho.
PAPER = {
    "cifar10-resnet18-sgd": (0.05, 128, 200, 5e-4, None),
    "cifar10-resnet18-sgd-decay": (0.05, 128, 200, 1e-3, None),
    "cifar10-resnet18-sam": (0.05, 128, 200, 1e-3, 0.1),
    "cifar10-resnet18-ssam-f": (0.05, 128, 200, 1e-3, 0.1),
    "cifar10-resnet18-ssam-d": (0.05, 128, 200, 1e-3, 0.1),
    "cifar100-resnet18-sam": (0.05, 128, 200, 1e-3, 0.2),
    "cifar100-wrn28-10-ssam-f": (0.05, 128, 200, 1e-3, 0.2),
    "cifar10-wrn28-10-sgd": (0.05, 128, 200, 5e-4, None),
    "cifar10-vgg11-sam": (0.05, 128, 200, 1e-3, 0.05),
    "imagenet-resnet50-sgd": (0.1, 256, 90, 1e-4, None),
    "imagenet-resnet50-ssam-d": (0.1, 256, 90, 1e-4, 0.07),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_numbers(name):
    r = load_recipe(RECIPES / f"{name}.toml")
    rho = r.sam.rho if r.sam.enabled else None
    assert (r.optimizer.lr, r.data.batch_size, r.train.epochs, r.optimizer.weight_decay, rho) == PAPER[name]
    assert r.optimizer.momentum == 0.9
    if "cifar" in name:
        assert (r.data.crop_padding, r.data.flip, r.data.cutout, r.data.cutout_probability) == (4, True, 16, 0.5)
    if name.endswith("-f"):
        assert (r.mask.kind, r.mask.samples, r.mask.interval_epochs) == ("fisher", 128, 1)
    if name.endswith("-d"):
        assert (r.mask.kind, r.mask.drop, r.mask.criterion) == ("dynamic", 0.5, "flattest")


REFUSED = [
    ("train.epoch=3", "unknown key train.epoch; did you mean train.epochs?"),
    ("colour=3", "unknown key colour; known keys: name, model, data,"),
    ("mask.sparsity=2", "mask.sparsity must be a number in [0, 1], but is 2.0"),
    ("train.epochs=1.5", "train.epochs must be a whole number >= 1, but is 1.5"),
    ("train.epochs=0", "train.epochs must be a whole number >= 1, but is 0"),
    ("optimizer.name=sdg", "optimizer.name must be one of sgd, adam, adamw, but is 'sdg'"),
    ("optimizer.lr=0", "optimizer.lr must be a number > 0, but is 0.0"),
    ("optimizer.lr=inf", "optimizer.lr must be a number > 0, but is inf"),
    ("sam.enabled=1", "sam.enabled must be true or false, but is 1"),
    ("sam.rho=-1", "sam.rho must be a number >= 0, but is -1.0"),
    ("data=3", "data must be a table of settings, but is 3"),
    ("name=3", "name must be a text, but is 3"),
    ("nonsense", "an override must have the form key=value, such as train.epochs=10, but is 'nonsense'"),
    ("name.x=3", "unknown key name.x"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refused(override, message):
    with pytest.raises(RecipeError, match=f"^{re.escape(message)}"):
        load_recipe(RECIPES / "digits-sam.toml", ["name=x", override] if override == "name.x=3" else [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sam]\nenabled = false\n[mask]\nkind = 'fisher'", "mask has no meaning where sam.enabled is false"),
        ("[data]\nname = 'imagefolder'\nflip = true", "data.flip has no meaning for imagefolder"),
        ("[data]\nname = 'imagefolder'\nresize = 100", "data.resize must be at least data.image_size, 224, but is 100"),
        ("[mask]\nkind = 'budget'\nfull = 0.5", "mask.budget must be above 1 + mask.full, 1.5, but is 1.25"),
        (
            "[mask]\nkind = 'fisher'\nlate = true",
            "mask.late has a meaning for mask.kind = budget only, but that is fisher",
        ),
        (
            "[mask]\nmomentum_rho = 1.0",
            "mask.momentum_rho has a meaning for mask.kind = budget only, but that is dense",
        ),
        ("[mask]\nkind = 'budget'\nlate = true\nfull = 0.2", "mask.full must be 0 for mask.late = true, but is 0.2"),
        (
            "[mask]\nkind = 'budget'\nmomentum_rho = 1.0",
            "mask.momentum_rho has a meaning for mask.late = true only, but that is false",
        ),
        (
            "[mask]\nkind = 'budget'\nlate_share = 0.5",
            "mask.late_share has a meaning for mask.late = true only, but that is false",
        ),
        ("[mask]\nkind = 'budget'\nfull_rho = 1.0", "mask.full_rho is the radius of full steps, but mask.full is 0"),
        (
            "[optimizer]\nmomentum = 0.0\n[mask]\nkind = 'budget'\nlate = true\nmomentum_rho = 1.0",
            "optimizer.momentum must be above 0 for mask.momentum_rho, but is 0",
        ),
        ("[data", "recipe.toml is not valid TOML"),
        ("extends = 'gone.toml'", "must name a recipe beside it, but is 'gone.toml'"),
        ("extends = 3", "must name a recipe beside it, but is 3"),
        ("extends = 'recipe.toml'", "recipe.toml extends itself"),
        ("data = 3", "data must be a table of settings, but is 3"),
    ],
)
def test_refused_files(tmp_path, text, message):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_recipe(tmp_path / "recipe.toml")


def test_a_missing_file_is_named_and_similar_ones_are_offered():
    with pytest.raises(RecipeError, match=r"there is no recipe at .*digit-sam\.toml; did you mean .*digits-sam\.toml"):
        load_recipe(RECIPES / "digit-sam.toml")


def test_overrides_keep_their_types():
    r = load_recipe(RECIPES / "digits-sam.toml", ["train.precision=bf16", "sam.rho=1", "data.flip=true", "name='a=b'"])
    assert (r.train.precision, r.sam.rho, r.data.flip, r.name) == ("bf16", 1.0, True, "a=b")
