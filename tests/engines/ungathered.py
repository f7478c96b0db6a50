"""``dsframe.train`` where no evaluation has memory for whole weights: they are gathered as modules are called."""

from dsframe import train
from dsframe.engines import evaluating

if __name__ == "__main__":
    evaluating.SHARE = 0.0
    train.main()
