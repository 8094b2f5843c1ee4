"""`speculators train` with layertap's backend registered; the same arguments, also under torchrun."""

from speculators.train.cli import main
from speculators.train.config import TrainConfig

if __name__ == "__main__":
    main(TrainConfig.resolve())
