"""Checkpoints that any engine on any number of processes can read, and that are whole or not there at all.

``layout`` says where each tensor lies in the files, ``writer`` and ``reader`` write and read them, ``store`` makes a
folder of files a checkpoint, ``saver`` lets all ranks write one together, ``resume`` continues a run from one.
"""
