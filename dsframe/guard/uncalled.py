"""Finds methods of a user's class that dsframe never calls because their names are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

from dsframe.config.read.suggest import closest
from dsframe.hooks import Hooks
from dsframe.model.user_state import codes_in
from dsframe.tasks.task import Task

_NAMES = {
    "model": "build_model configure_model create_model get_model forward",
    "loss": "compute_loss criterion loss_fn loss_function training_step train_step",
    "metrics": "compute_metrics evaluation_step eval_step validation_step",
    "train_data": "get_train_data get_train_dataset train_dataloader train_dataset training_data training_dataset train_loader",
    "eval_data": "dev_data evaluate_data evaluation_data eval_dataset get_eval_data test_data val_data val_dataloader "
    "val_dataset val_loader valid_data validation_data validation_dataset",
    "predict_data": "predict_dataloader predict_dataset prediction_data",
    "optimizer": "configure_optimizers create_optimizer get_optimizer optimizers",
    "collate": "collate_batch collate_fn",
    "on_start": "on_fit_start on_train_begin on_train_start",
    "on_step": "on_step_end on_train_batch_end",
    "on_evaluation": "on_evaluate on_validation_end on_validation_epoch_end",
    "on_checkpoint": "on_save on_save_checkpoint",
    "on_end": "on_fit_end on_train_end",
}
_MEANT = {other: name for name, others in _NAMES.items() for other in others.split()}
"""Method names of other trainers, and common names, mapped to the dsframe method with that purpose."""


def lines(user: type) -> Iterator[str]:
    """Yields a warning for each uncalled method of a task or of hooks whose name resembles one that is called."""
    bases = [base for base in (Task, Hooks) if issubclass(user, base)]
    known = {name for base in bases for name in dir(base)}
    of_hooks = {name for name in vars(Hooks) if name.startswith("on_")}
    theirs = [kind for kind in user.__mro__ if not kind.__module__.startswith("dsframe.")]  # including mixins
    classes = [kind for kind in theirs if issubclass(kind, (Task, Hooks))]
    held = {name: value for kind in classes for name, value in vars(kind).items() if not name.startswith("_")}
    functions = [value for kind in theirs for value in vars(kind).values() if isinstance(value, FunctionType)]
    used = {name for function in functions for code in codes_in(function.__code__) for name in code.co_names}
    for name in sorted(held.keys() - known - used):
        method, names = isinstance(held[name], FunctionType), [other for other in known | of_hooks if other[0] != "_"]
        meant = _MEANT.get(name, name if name in of_hooks else None) or (closest(name, names) if method else None)
        question = f'; did you mean "{meant}"?'
        remedy = f': {meant} belongs to a class of hooks (dsframe.Hooks), named by "hooks" in the section "dsframe"'
        if meant in known | of_hooks:
            yield f"warning: {user.__name__}.{name} is not called by dsframe{question if meant in known else remedy}"
