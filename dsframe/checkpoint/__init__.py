"""Checkpoints that any engine on any number of processes can read, and that are either complete or absent.

``layout`` computes where each tensor is in the files, ``writer`` and ``reader`` write and read them, ``store`` turns a
folder of files into a checkpoint, ``saver`` lets all ranks write one together, ``resume`` continues a run from one.
"""
