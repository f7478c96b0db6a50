"""Checkpoints that any engine on any number of processes can read, and that are whole or not there at all.

``state`` says what is kept, ``portable`` how it lies in files, ``store`` how files come and go, ``saver`` how the ranks write
one together, ``resume`` how a run continues from one, ``export`` how weights leave.
"""
