"""Recipes: what is in them, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from sparsam.models import build_model
from sparsam.replay import count_costs
from sparsam.runs.config import MASKS, SamConfig
from sparsam.runs.library import PACKAGED, packaged_recipes
from sparsam.runs.recipe import Recipe, load_recipe, recipe_from, relevant_overrides
from sparsam.runs.schema import RecipeError
from sparsam.thrifty import RHO, choose


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_recipe_is_valid_by_name_and_by_path(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe == load_recipe(PACKAGED / f"{name}.toml")
    assert recipe_from(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert packaged_recipes()[name]  # a first line that says what it is


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
    r = load_recipe(name)
    rho = r.sam.rho if r.sam.enabled else None
    assert (r.optimizer.lr, r.data.batch_size, r.train.epochs, r.optimizer.weight_decay, rho) == PAPER[name]
    assert r.optimizer.momentum == 0.9
    if "cifar" in name:
        assert (r.data.crop_padding, r.data.flip, r.data.cutout, r.data.cutout_probability) == (4, True, 16, 0.5)
    if name.endswith("-f"):
        assert (r.mask.name, r.mask.samples, r.mask.interval_epochs) == ("fisher", 128, 1)
    if name.endswith("-d"):
        assert (r.mask.name, r.mask.drop, r.mask.criterion) == ("dynamic", 0.5, "flattest")


METHODS = {
    "SGD": ["sam.enabled=false"],
    "AdamW": ["sam.enabled=false", "optimizer.name=adamw"],
    "SAM": [],
    "ASAM": ["sam.adaptive=true"],
    "SAM on a share": ["sam.share=0.25"],
    "SSAM-F": ["mask=fisher"],
    "SSAM-D": ["mask=dynamic"],
    "SSAM, random": ["mask=random"],
    "SAM-ON": ["mask=norm"],
    "SSAM-C": ["mask=suffix", "mask.cut=layer2"],
    "Thrifty SAM": [
        "mask=suffix",
        "mask.cut=layer2",
        "ascent=friendly",
        "schedule=last-steps",
        "schedule.fraction=0.3",
    ],
    "F-SAM": ["ascent=friendly"],
    "Momentum-SAM": ["ascent=momentum"],
    "ASSAM-F": ["mask=fisher", "sam.adaptive=true"],
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_are_called_what_people_call_them(method):
    assert load_recipe("digits-sam", METHODS[method]).method == method


def test_a_policy_of_one_s_own_is_not_called_sam():
    recipe = load_recipe("digits-sam")
    assert replace(recipe, mask=replace(recipe.mask, name="salient")).method == "SSAM, salient"
    assert replace(recipe, ascent=replace(recipe.ascent, name="half")).method == "SAM, half"


REFUSED = [
    ("train.epoch=3", "unknown key train.epoch; did you mean train.epochs?"),
    ("epochs=3", "unknown key epochs; did you mean train.epochs?"),
    ("rho=3", "unknown key rho; did you mean sam.rho or ascent.rho or schedule.before.rho?"),
    ("train.sparsity=0.5", "unknown key train.sparsity; did you mean mask.sparsity?"),
    ("train.rho=0.5", "unknown key train.rho; did you mean sam.rho or ascent.rho or schedule.before.rho?"),
    ("trian.epochs=3", "unknown key trian.epochs; did you mean train.epochs?"),
    ("optimiser.rho=1", "unknown key optimiser.rho; did you mean sam.rho or ascent.rho or schedule.before.rho?"),
    ("before.sigma=1", "unknown key before.sigma; did you mean schedule.before.sigma?"),
    ("mask.before.rho=1", "unknown key mask.before.rho; did you mean schedule.before.rho?"),
    ("schedule.befor.roh=1", "unknown key schedule.befor.roh; did you mean schedule.before.rho?"),
    ("mask.iner.sparsty=0.5", "unknown key mask.iner.sparsty; did you mean mask.inner.sparsity?"),
    ("msk.inner.name=fisher", "unknown key msk.inner.name; did you mean mask.inner.name?"),
    ("inner.sparsity=0.5", "unknown key inner.sparsity; did you mean mask.inner.sparsity?"),
    ("inner=fisher", "unknown key inner; did you mean mask.inner?"),
    ("modle=resnet18", "unknown key modle; did you mean model?"),
    ("schedul.before.rho=1", "unknown key schedul.before.rho; did you mean schedule.before.rho?"),
    ("sparcity=0.5", "unknown key sparcity; did you mean mask.sparsity?"),
    ("colour=3", "unknown key colour; known keys: name, model, data,"),
    ("mask.kind=fisher", "unknown key mask.kind; known keys: mask.name, mask.sparsity,"),
    ("mask.name=fishr", f"mask.name must be one of {', '.join(MASKS)}, but is 'fishr'"),
    ("train.epochs=1.5", "train.epochs must be a whole number >= 1, but is 1.5"),
    ("train.epochs=0", "train.epochs must be a whole number >= 1, but is 0"),
    ("train.epochs=none", "train.epochs must be a whole number >= 1, but is 'none'"),
    ("train.max_steps=0", "train.max_steps must be a whole number >= 1 or none, but is 0"),
    ("train.checkpoint_epochs=0", "train.checkpoint_epochs must be a whole number >= 1 or none, but is 0"),
    ("data.validation=0", "data.validation must be a whole number >= 1 or none, but is 0"),
    ("data.limit=many", "data.limit must be a whole number >= 1 or none, but is 'many'"),
    ("optimizer.name=sdg", "optimizer.name must be one of sgd, adam, adamw, but is 'sdg'"),
    ("optimizer.lr=0", "optimizer.lr must be a number > 0, but is 0.0"),
    ("optimizer.lr=inf", "optimizer.lr must be a number > 0, but is inf"),
    ("sam.enabled=1", "sam.enabled must be true or false, but is 1"),
    ("sam.rho=-1", "sam.rho must be a number >= 0, but is -1.0"),
    ("sam.rho=none", "sam.rho must be a number >= 0, but is 'none'"),
    ("sam.ramp_epochs=-0.5", "sam.ramp_epochs must be a number >= 0, but is -0.5"),
    ("sam.ramp_epochs=none", "sam.ramp_epochs must be a number >= 0, but is 'none'"),
    ("data=3", "data must be a table of settings, but is 3"),
    ("name=3", "name must be a text, but is 3"),
    ("nonsense", "an override must have the form key=value, such as train.epochs=10, but is 'nonsense'"),
    ("name.x=3", "unknown key name.x"),
    ("train.epochs.x=3", "unknown key train.epochs.x"),
    ("mask.sparsity=0.9", "mask.sparsity has no meaning for mask.name = dense, only for random, fisher, dynamic; leave it out"),
    ("data.root=x", "data.root has no meaning for data.name = digits, only for cifar10, cifar100, imagefolder; leave it out"),
    ("ascent.sigma=1", "ascent.sigma has no meaning for ascent.name = gradient, only for friendly; leave it out"),
    ("schedule.fraction=0.3", "schedule.fraction has no meaning for schedule.name = every-step, only for last-steps; leave it out"),
    ("mask=suffix", "mask.cut must be given for mask.name = suffix: the name of a module"),
    ("schedule=every-nth", "schedule.n must be given for schedule.name = every-nth: a whole number >= 1"),
    ("schedule=last-steps", "schedule.fraction must be given for schedule.name = last-steps: a number in (0, 1]"),
    *((f"schedule={{name='last-steps', fraction={given}}}", f"schedule.fraction must be a number in (0, 1], but is {given}.0") for given in (0, 30)),
    ("ascent={name='friendly', decay=30}", "ascent.decay must be a number in [0, 1], but is 30.0"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refused(override, message):
    with pytest.raises(RecipeError, match=f"^{re.escape(message)}"):
        load_recipe("digits-sam", [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sam]\nenabled = false\n[mask]\nname = 'fisher'", "mask has no meaning where sam.enabled is false"),
        ("schedule = {name = 'every-nth', n = 5}\nsam.enabled = false", "schedule has no meaning where sam.enabled"),
        ("[data]\nname = 'imagefolder'\nflip = true", "data.flip has no meaning for data.name = imagefolder"),
        ("[data]\nname = 'imagefolder'\nresize = 100", "data.resize must be at least data.image_size, 224, but is 100"),
        ("[mask]\nname = 'fisher'\nsparsity = 2", "mask.sparsity must be a number in [0, 1], but is 2.0"),
        ("[mask]\nname = 'fisher'\nsparsity = 'none'", "mask.sparsity must be a number in [0, 1], but is 'none'"),
        ("[mask]\nname = 'fisher'\ncut = 'layer2'", "mask.cut has no meaning for mask.name = fisher, only for suffix"),
        ("[mask]\nname = 'suffix'\ncut = 3", "mask.cut must be the name of a module, but is 3"),
        (
            "[mask]\nname = 'suffix'\ncut = 'layer2'\ninner = {name = 'norm', drop = 0.5}",
            "mask.inner.drop has no meaning for mask.inner.name = norm, only for dynamic",
        ),
        (
            "[mask]\nname = 'suffix'\ncut = 'layer2'\ninner = {name = 'fisher', sparsty = 0.5}",
            "unknown key mask.inner.sparsty; did you mean mask.inner.sparsity?",
        ),
        (
            "[schedule]\nname = 'last-steps'\nfraction = 0.3\nbefore = {name = 'momentum', roh = 0.1}",
            "unknown key schedule.before.roh; did you mean schedule.before.rho?",
        ),
        (
            "[schedule]\nname = 'last-steps'\nfraction = 0.3\nbefore = 'momentun'",
            "schedule.before.name must be one of gradient, friendly, momentum, but is 'momentun'",
        ),
        (
            "[optimizer]\nmomentum = 0.0\n[schedule]\nname = 'last-steps'\nfraction = 0.3\nbefore = 'momentum'",
            "optimizer.momentum must be above 0 for schedule.before.name = momentum, but is 0",
        ),
        (
            "train.precision = 'fp16'\n[mask]\nname = 'suffix'\ncut = 'layer2'",
            "train.precision must be fp32 or bf16 for mask.name = suffix: fp16 steps have no closure",
        ),
        (
            "sam.ramp_epochs = 1\n[schedule]\nname = 'last-steps'\nfraction = 0.3\nbefore = 'momentum'",
            "sam.ramp_epochs must be 0 with schedule.before, whose steps would have rho = 0, but is 1",
        ),
        (
            "sam.ramp_epochs = 0.5\nascent = {name = 'momentum', rho = 0.1}",
            "sam.ramp_epochs must be 0 with ascent.rho, because the ramp is that of sam.rho, but is 0.5",
        ),
        ("[data", "recipe.toml is not valid TOML"),
        ("extends = 'gone.toml'", "recipe.toml: there is no recipe at "),
        ("extends = 'digit-sgd'", "recipe.toml: there is no recipe named 'digit-sgd'; did you mean digits-sgd"),
        ("extends = 3", "must be the name or the path of a recipe, but is 3"),
        ("extends = 'recipe.toml'", "recipe.toml extends itself"),
        ("data = 3", "data must be a table of settings, but is 3"),
    ],
)
def test_refused_files(tmp_path, text, message):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("digit-sam", r"^there is no recipe named 'digit-sam'; did you mean digits-sam"),
        (PACKAGED / "digit-sam.toml", r"^there is no recipe at .*digit-sam\.toml; did you mean digits-sam"),
        ("recipes/digits-sam.toml", r"^there is no recipe at recipes/digits-sam\.toml; did you mean digits-sam\?"),
        ("x/y", r"^there is no recipe named 'x/y'; `sparsam recipes` lists"),
    ],
)
def test_an_unknown_recipe_is_named_and_similar_ones_are_offered(source, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(source)


def test_a_file_may_extend_a_packaged_recipe_and_a_file_beside_it(tmp_path):
    (tmp_path / "a.toml").write_text('extends = "digits-ssam-f"\n[train]\nepochs = 3\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n[mask]\nname = "dynamic"\ndrop = 0.2\n')
    a, b = load_recipe(tmp_path / "a.toml"), load_recipe(tmp_path / "b.toml")
    assert (a.name, a.mask, a.train.epochs) == ("a", load_recipe("digits-ssam-f").mask, 3)
    assert (b.name, b.mask.drop, b.train.epochs) == ("b", 0.2, 3)
    assert (b.mask.interval_epochs, b.mask.samples) == (1, None)  # Fisher's samples fell away, the interval did not


def test_overrides_keep_their_types():
    r = load_recipe("digits-sam", ["train.precision=bf16", "sam.rho=1", "data.flip=true", "name='a=b'"])
    assert (r.train.precision, r.sam.rho, r.data.flip, r.name) == ("bf16", 1.0, True, "a=b")


def test_none_takes_an_optional_setting_away():
    r = load_recipe("digits-ssam-f", ["mask.interval_epochs=none", "train.checkpoint_epochs=none"])
    assert (r.mask.interval_epochs, r.train.checkpoint_epochs) == (None, None)
    assert recipe_from(r.to_dict()) == r  # null in the JSON


def test_tables_inside_tables():
    cut = ["mask=suffix", "mask.cut=layer2", "mask.inner=fisher", "mask.inner.sparsity=0.9"]
    late = ["schedule=last-steps", "schedule.fraction=0.3", "schedule.before.name=momentum", "schedule.before.rho=1"]
    r = load_recipe("digits-sam", cut + late)
    assert (r.mask.inner.name, r.mask.inner.sparsity, r.mask.inner.samples) == ("fisher", 0.9, 128)
    assert (r.schedule.before.name, r.schedule.before.rho) == ("momentum", 1.0)
    assert load_recipe("digits-sam", [*cut, "mask.inner=none"]).mask.inner is None


def test_defaults_are_those_of_an_empty_recipe():
    assert Recipe() == recipe_from({})


OVERRIDES = ["sam.rho=1", "mask.sparsity=0.9", "mask.cut=layer3", "data.root=x", "train.epochs=1", "schedule.before.rho=2"]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "relevant"),
    [
        ("digits-sgd", ["train.epochs=1"]),
        ("digits-sam", ["sam.rho=1", "train.epochs=1"]),
        ("digits-ssam-f", ["sam.rho=1", "mask.sparsity=0.9", "train.epochs=1"]),
        ("digits-ssam-c", ["sam.rho=1", "mask.cut=layer3", "train.epochs=1"]),
        ("cifar10-resnet18-sgd", ["data.root=x", "train.epochs=1"]),
    ],
)
def test_overrides_concern_recipes_where_they_have_a_meaning(source, relevant):
    assert relevant_overrides(source, OVERRIDES) == relevant
    load_recipe(source, relevant)


OF_SAM = ["sam.rho=0.2", "sam.ramp_epochs=1", "sam.adaptive=true", "sam.rho=0.1", "mask=random", "mask.sparsity=0.9",
          "mask.inner.name=fisher", "ascent.name=gradient", "schedule.fraction=0.3", "sam={enabled=false, rho=0.2}"]  # fmt: skip


@pytest.mark.parametrize("override", OF_SAM)
def test_an_override_that_has_no_effect_without_sam_is_refused(override):
    key = re.escape(override.partition("=")[0])
    message = rf"^{key} has no meaning where sam\.enabled is false; set sam\.enabled=true too, or choose a recipe that "
    with pytest.raises(RecipeError, match=message):
        load_recipe("digits-sgd", ["train.epochs=1", override])
    with pytest.raises(RecipeError, match=message):
        load_recipe("digits-sam", [override, "sam.enabled=false"])
    assert relevant_overrides("digits-sgd", ["train.epochs=1", override]) == ["train.epochs=1"]


def test_an_override_that_has_an_effect_is_not_refused(tmp_path):
    assert load_recipe("digits-sgd", ["sam.rho=0.3", "sam.enabled=true"]).sam == SamConfig(rho=0.3)
    assert not load_recipe("digits-sam", ["sam={enabled=false}"]).sam.enabled
    assert relevant_overrides("digits-sam", ["sam={enabled=false}"]) == ["sam={enabled=false}"]
    (tmp_path / "own.toml").write_text('extends = "digits-sam"\n[sam]\nenabled = false\n')
    assert load_recipe(tmp_path / "own.toml", ["train.epochs=1"]).sam.rho == 0.1  # inherited
    with pytest.raises(RecipeError, match=r"^unknown key sam\.roh; did you mean sam\.rho\?$"):
        load_recipe("digits-sgd", ["sam.roh=0.2"])
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(RecipeError, match=r"^sam must be a table of settings, but is 3$"):
        load_recipe(tmp_path / "empty.toml", ["sam=3"])


def test_an_override_of_a_name_decides_what_has_a_meaning():
    assert relevant_overrides("digits-sam", ["mask.name=random", "mask.sparsity=0.9"]) == ["mask.name=random", "mask.sparsity=0.9"]  # fmt: skip
    assert relevant_overrides("digits-ssam-f", ["sam.enabled=false", "sam.rho=1"]) == ["sam.enabled=false"]
    assert relevant_overrides("digits-sam", ["mask.sparsity=0.9"], first=["mask=random"]) == ["mask.sparsity=0.9"]
    assert relevant_overrides("digits-sam", ["sam.rho=1"], first=["sam.enabled=false"]) == []
    assert relevant_overrides("digits-sam", ["colour=3"]) == ["colour=3"]  # which is then refused


THRIFTY = {  # channels, size and number of the images, and the classes
    "digits-thrifty": (1, 8, 1200, 10),
    "cifar100-resnet18-thrifty": (3, 32, 50_000, 100),
    "cifar100-wrn28-10-thrifty": (3, 32, 50_000, 100),
    "cifar100-vit-thrifty": (3, 32, 50_000, 100),
}


@pytest.mark.parametrize("name", THRIFTY)
def test_thrifty_recipes_are_what_thrifty_chooses(name):
    """A recipe names cut and fraction, so that a run can be repeated: those of a budget of 1.15."""
    r, (channels, size, images, classes) = load_recipe(name), THRIFTY[name]
    model = build_model(r.model.name, classes, channels=channels).to("meta")
    counts = count_costs(model, torch.empty(r.data.batch_size, channels, size, size, device="meta"))
    choice = choose(counts, total_steps=r.train.epochs * (images // r.data.batch_size))
    assert (r.method, r.mask.cut, r.sam.rho) == ("Thrifty SAM", choice.cut, RHO)
    assert r.schedule.fraction == pytest.approx(choice.fraction, abs=5e-4)
    assert {n for n in packaged_recipes() if n.endswith("thrifty")} == THRIFTY.keys()
