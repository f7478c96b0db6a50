"""A task whose model is large enough to be built in files; the disk of one rank may be full."""

import resource
import tempfile

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe
from dsframe.cluster import world

WIDTH = 4096


class Wide(dsframe.Task):
    def __init__(self, full_on=None, width=WIDTH):
        self.full_on, self.width = full_on, width
        tempfile.tempdir = None  # a server of warm ranks has looked it up for itself

    def model(self):
        if world.here().rank == self.full_on:  # as a disk without room: what a file takes more is refused
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        return nn.Sequential(nn.Linear(self.width, self.width), nn.Linear(self.width, self.width))

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self):
        rows = torch.ones(4, self.width)
        return TensorDataset(rows, rows)
