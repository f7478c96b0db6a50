"""The catalogue of codes: what each message's ``[code]`` means, why it matters, what to write, and a file that has the mistake.

``dsframe explain`` and docs/messages.md print it. A test runs every example and compares the codes here with those in the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One kind of finding."""

    means: str
    """What is wrong, or what a note tells."""
    why: str
    """Why it matters."""
    write: str
    """What to write instead."""
    example: str = ""
    """A file that gets this code; none where the command alone does."""
    command: str = "check FILE"
    """How to see the message, after ``dsframe``."""


CODES: Mapping[str, Code] = {
    "auto": Code(
        'The file says "auto". A note tells the value that dsframe takes; an error says that "auto" is not possible there.',
        "Hugging Face's Trainer fills such values in before DeepSpeed sees the file. dsframe fills them in by the same "
        "rules. Where the Trainer has no rule, DeepSpeed would crash on the word.",
        "For a note: nothing. For an error: write the value, or remove the key.",
        '{"train_batch_size": 8, "steps_per_print": "auto"}',
    ),
    "auto-later": Code(
        'The value of "auto" is not known yet.',
        "It depends on the model's hidden size or on the number of steps, which are known only when training starts.",
        "Nothing. To see the value now, write it yourself.",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}',
    ),
    "batch": Code(
        "The batch sizes do not fit together.",
        "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks. dsframe "
        "never rounds: another batch size would be another training.",
        "Remove one of the three keys, and dsframe computes it. Or choose one of the sizes that the message lists.",
        '{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}',
        "check FILE -np 3",
    ),
    "broken": Code(
        "The file switches on something that fails in the supported version of DeepSpeed.",
        "The run would start, and fail later, for example when it saves.",
        "Remove the key that the message names.",
        '{"train_batch_size": 8, "checkpoint": {"writer": {"type": "PYTHON"}}}',
    ),
    "coerced": Code(
        "A value has the wrong type, and DeepSpeed converts it.",
        'DeepSpeed reads "2" as 2 in some sections and fails in others.',
        "Write the value that the message shows. `dsframe check --fix` does it.",
        '{"train_batch_size": 8, "zero_optimization": {"stage": "2"}}',
    ),
    "comment": Code(
        "The key is taken as a comment.",
        "Keys such as _comment, or keys that begin with //, have no meaning to DeepSpeed at the top level.",
        "Nothing. // comments are possible as well: DeepSpeed reads HJSON.",
        '{"train_batch_size": 8, "_comment": "ours"}',
    ),
    "conflict": Code(
        "Two values exclude each other, or one needs another that is absent.",
        "DeepSpeed raises an error after all processes have started, or trains something else than the file says.",
        "Keep one of the two, or add what is needed: the message says which.",
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}',
    ),
    "convert": Code(
        "A file of another framework cannot be converted.",
        "It cannot be read, or it is none of those that `dsframe convert` knows.",
        "What the message says.",
        '{"seed": 1}',
        "convert FILE",
    ),
    "deprecated": Code(
        "An old spelling.",
        "This version of DeepSpeed reads it; a later one may not.",
        "Write the new spelling. `dsframe check --fix` does it.",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}}',
    ),
    "duplicate-key": Code(
        "The same key stands twice in one object.",
        "JSON readers keep one of the two values, and not all keep the same. DeepSpeed raises an error.",
        "Remove one of the two.",
        '{"train_batch_size": 8, "steps_per_print": 1, "steps_per_print": 2}',
    ),
    "engine": Code(
        "How this engine runs the file.",
        "ZeRO, offload and pipelines change where state lives, not the result. An engine of full replicas trains the "
        "same without them and needs more memory.",
        'Nothing, or choose another "engine".',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "dsframe": {"engine": "ddp"}}',
    ),
    "engine-cannot": Code(
        "The engine does not support something that the file switches on.",
        "Without it the training would be another one. dsframe refuses instead of ignoring the key.",
        'Choose another "engine", or remove the key.',
        '{"train_batch_size": 8, "dsframe": {"engine": "ddp", "horovod": {"op": "adasum"}}}',
    ),
    "imports": Code(
        "The file names a Python class.",
        "To train this file imports that module and runs its code. Do not train files from strangers.",
        "Nothing, if you trust the module.",
        '{"train_batch_size": 8, "dsframe": {"task": {"name": "circles:Circles"}}}',
    ),
    "keep-best": Code(
        "The best checkpoint is to be kept, and nothing is evaluated.",
        "Without evaluation there is no metric that could tell which checkpoint is the best.",
        'Give the task evaluation data, or remove "keep_best".',
        '{"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, '
        '"dsframe": {"task": {"name": "mine:Mine"}, "steps": 1, "checkpoints": {"every_steps": 1, "keep_best": "loss:min"}}}',
        "train --config FILE --engine single",
    ),
    "lr-scaling": Code(
        "By how much the learning rates are scaled.",
        "The file asks for it under dsframe.large_batch: the rates were found for another batch size.",
        'Nothing. To switch it off, write "lr_scaling": "none".',
        '{"train_batch_size": 8, "dsframe": {"large_batch": {"lr_scaling": "linear", "reference_batch_size": 4}}}',
        "check FILE -np 2",
    ),
    "misplaced-key": Code(
        "The key belongs to another section.",
        "DeepSpeed ignores it where it is, or raises an error.",
        "Move it to the section that the message names. `dsframe check --fix` does it.",
        '{"train_batch_size": 8, "offload_optimizer": {"device": "cpu"}, "zero_optimization": {"stage": 2}}',
    ),
    "missing": Code(
        "A required key is absent.",
        "DeepSpeed has no default for it.",
        "Add the key.",
        '{"train_batch_size": 8, "optimizer": {"params": {"lr": 0.1}}}',
    ),
    "missing-file": Code(
        "The file does not exist, or cannot be read or written.",
        "dsframe looks for the path itself, then in ds_configs/ of this directory, then among the files that come with it.",
        "Write the path of a file, or a name from the list that the message shows.",
        command="check zreo3",
    ),
    "model": Code(
        "The model cannot do what the file asks for under dsframe.model.",
        "Only the model itself tells it, so the message comes at the start of a training.",
        "The message names what the model has.",
        '{"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, '
        '"dsframe": {"task": {"dataset": "synthetic"}, "steps": 1, "model": {"activation_checkpointing": ["Blok"]}}}',
        "train --config FILE --engine single",
    ),
    "no-effect": Code(
        "The key changes nothing in this file.",
        "Another key that it depends on is absent or switched off. Perhaps the file means more than it does.",
        "Remove the key, or add what it needs: the message says which.",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}}',
    ),
    "not-installed": Code(
        "The file needs a package or a program that this machine does not have.",
        "The run would fail when it first needs it, on some ranks only.",
        "Install it, or switch the section off.",
        '{"train_batch_size": 8, "datastates_ckpt": {"parser_threads": 1}}',
    ),
    "null": Code(
        "null stands where true or false is expected.",
        "DeepSpeed takes it for false.",
        "Write false, or remove the key.",
        '{"train_batch_size": 8, "dump_state": null}',
    ),
    "nvme-path": Code(
        "The folder for NVMe offload is not on this machine.",
        "DeepSpeed creates the folder, but not the drive.",
        "Mount the drive, or change nvme_path. If other machines run this file, ignore the warning.",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": '
        '{"device": "nvme", "nvme_path": "/no/such/drive"}}}',
    ),
    "other-tool": Code(
        "This is the configuration of another program.",
        "None of its keys means anything to DeepSpeed's training.",
        "Check the DeepSpeed configuration instead. docs/configuration.md lists its keys.",
        '{"distributed_type": "DEEPSPEED", "num_machines": 1}',
    ),
    "override": Code(
        "An argument of --set does not have the form dotted.key=value.",
        "dsframe cannot tell which key to change.",
        "Write for example --set dsframe.steps=50.",
        '{"train_batch_size": 8}',
        "check FILE --set nonsense",
    ),
    "portability": Code(
        "The file works here and fails elsewhere, for example with plain DeepSpeed or on GPUs.",
        "dsframe runs it; the message says who does not.",
        "Nothing if only dsframe, on this kind of machine, reads the file. Else write what the message says.",
        '{"train_batch_size": 8, "scheduler": {"type": "StepLR", "params": {"step_size": 5}}, '
        '"zero_optimization": {"stage": 1}}',
    ),
    "range": Code(
        "The value has the right type and is outside its range.",
        "DeepSpeed, dsframe or torch would raise an error, or train nonsense.",
        "Write a value inside the range that the message gives.",
        '{"train_batch_size": 8, "gradient_clipping": -1}',
    ),
    "removed": Code(
        "DeepSpeed 0.19 has removed this key.",
        "It raises an error if the key is present, whatever its value.",
        "Remove the key; the message names the replacement if there is one.",
        '{"train_batch_size": 8, "elasticity": {"enabled": true}}',
    ),
    "resume": Code(
        "A resumed run will not continue exactly.",
        "Part of the state is not in checkpoints.",
        "Choose another value if you interrupt and resume runs. Else ignore the warning.",
        '{"train_batch_size": 8, "dsframe": {"engine": "ddp", "ddp": {"communication": "power_sgd"}}}',
    ),
    "run-dir": Code(
        "The run's directory cannot be written to.",
        "A run keeps its record and its checkpoints there.",
        "Choose another directory with --run-dir, or change its permissions.",
        '{"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, '
        '"dsframe": {"task": {"dataset": "synthetic"}, "steps": 1}}',
        "train --config FILE --engine single --run-dir /dev/null/runs",
    ),
    "schedule": Code(
        "The learning-rate schedule does not fit the training.",
        "For example, the training ends before the warm-up does, and no step has the full learning rate.",
        "Change one of the two numbers that the message names.",
        '{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}}',
    ),
    "slow": Code(
        "The training is correct and slower than it could be.",
        "For example, the stages of a pipeline wait for each other.",
        "Change what the message names, if speed matters.",
        '{"train_batch_size": 8, "gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}',
    ),
    "syntax": Code(
        "The text is not JSON or HJSON.",
        "DeepSpeed cannot read it either.",
        "Correct the text at the place that the message gives; often a bracket or a quotation mark is missing.",
        '{"train_batch_size": 8, "fp16": {"enabled": true}',
    ),
    "type": Code(
        "The value has the wrong type.",
        "DeepSpeed raises an error, or fails at the first step.",
        "Write a value of the type that the message names; numbers stand without quotes.",
        '{"train_batch_size": "8"}',
    ),
    "unknown-key": Code(
        "DeepSpeed and dsframe have no such key here.",
        "DeepSpeed ignores it, or raises an error. A misspelled key is the most frequent silent mistake.",
        "Write the name that the message suggests, or remove the key. If a newer DeepSpeed knows it, list it under "
        '"dsframe": {"pass_through": [...]}.',
        '{"train_batch_size": 8, "zero_optimisation": {"stage": 2}}',
    ),
    "value": Code(
        "The value is none of those that are possible here.",
        "DeepSpeed or dsframe would raise an error.",
        "Write one of the values that the message lists.",
        '{"train_batch_size": 8, "communication_data_type": "fp8"}',
    ),
    "world": Code(
        "The number of processes does not fit the file.",
        "Pipeline stages, tensor-parallel groups and shards need numbers that divide the number of processes.",
        "Start another number of processes, or change the size that the message names.",
        '{"train_batch_size": 8, "pipeline": {"stages": 2}}',
        "check FILE -np 3",
    ),
}
"""Code -> its explanation."""


@dataclass(frozen=True)
class Exit:
    """One exit code of ``dsframe`` and ``python -m dsframe.train``."""

    code: str
    """The code that such a message ends with; empty where there is no message, or another one."""
    means: str
    do: str
    """What to do."""


EXITS: Mapping[int, Exit] = {
    0: Exit("", "The command did what it was asked for.", "Nothing."),
    1: Exit(
        "error",
        "An error without a code of its own, or a bug: then there is a traceback. `dsframe check --strict`: there are warnings.",
        "Read the message. For a traceback that ends in dsframe, please report it.",
    ),
    2: Exit("configuration", "The configuration file or the command line is wrong.", "Run `dsframe check FILE`."),
    3: Exit(
        "launcher",
        "What the launcher tells the processes contradicts itself, or they cannot reach each other.",
        "Run `dsframe doctor`. Look for environment variables of another launcher, such as RANK or OMPI_*.",
    ),
    4: Exit(
        "engine-unavailable",
        "The engine is not installed, or it does not support what the model or the file needs.",
        "Install what the message names, or choose another engine with --engine.",
    ),
    5: Exit(
        "task",
        "The task cannot be imported, it does not implement `dsframe.Task`, or its model is not the same on every rank.",
        "Correct the task's module: the message says what is missing, or what differs.",
    ),
    6: Exit(
        "data",
        "Data are missing, damaged, too few for one global batch, or not the same on every rank.",
        "Download them again (`python -m dsframe.data.fetch`), make the batch smaller, or sort what comes out of a set.",
    ),
    7: Exit(
        "training",
        "Training cannot go on: the loss is not finite, or another process of the run has ended.",
        "Read the first message of the other ranks. For a loss that is not finite: lower the learning rate, or see "
        "`on_nonfinite` in the file.",
    ),
    8: Exit(
        "checkpoint",
        "A checkpoint is missing, incomplete, damaged, or of another model.",
        "Resume from another one (--resume PATH), or start over with --resume never.",
    ),
    9: Exit(
        "hang",
        "No step has ended for dsframe.hang_timeout_seconds. The stacks of all ranks are printed before.",
        "Look at the stacks: which rank waits for which? If steps are slow, raise hang_timeout_seconds.",
    ),
    75: Exit(
        "stopped",
        "A signal asked the run to stop. It has saved a checkpoint.",
        "Start the same command again with --resume auto. Job schedulers take this code as `try again`.",
    ),
    130: Exit("", "Interrupted with Ctrl-C.", "Nothing."),
}
"""Exit code -> its explanation. 128 + N stands for signal N, as in a shell."""
