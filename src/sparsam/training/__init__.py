"""Recipes and the trainer that follows them."""

from sparsam.runs.recipe import Recipe, RecipeError, load_recipe, recipe_from
from sparsam.training.trainer import Interrupted, Trainer, resume, train

__all__ = ["Interrupted", "Recipe", "RecipeError", "Trainer", "load_recipe", "recipe_from", "resume", "train"]
