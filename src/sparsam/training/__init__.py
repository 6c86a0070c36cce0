"""Recipes and the trainer that follows them."""

from sparsam.runs.recipe import Recipe, load_recipe, recipe_from
from sparsam.runs.schema import RecipeError
from sparsam.training.interrupt import Interrupted
from sparsam.training.launch import resume, train
from sparsam.training.trainer import Trainer

__all__ = ["Interrupted", "Recipe", "RecipeError", "Trainer", "load_recipe", "recipe_from", "resume", "train"]
