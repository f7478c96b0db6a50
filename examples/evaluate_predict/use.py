"""The trained model in a program of your own: a plain nn.Module, in evaluation mode."""

import torch

import dsframe

model = dsframe.load_model("runs/classifier")
with torch.no_grad():
    print(model(torch.zeros(2, 3, 16, 16)).softmax(1))
