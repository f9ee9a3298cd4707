"""Hooks that send the lines of a training run to Weights & Biases or to MLflow:

    cd examples/tracking
    aliquot train gpt-10m --data text.txt --steps 200 --log-to trackers:to_wandb

A hook is a function of one line: a dict with `step` and figures such as `loss`, `mean_loss`, `mfu`
or `validation_loss`. Steps never fall.
"""


def to_wandb(row):
    """Send a line to Weights & Biases (`pip install wandb`; WANDB_PROJECT names the project)."""
    import wandb

    if wandb.run is None:
        wandb.init()
    wandb.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])


def to_mlflow(row):
    """Send a line to MLflow (`pip install mlflow`; MLFLOW_TRACKING_URI says where to)."""
    import mlflow

    if mlflow.active_run() is None:
        mlflow.start_run()
    figures = {name: value for name, value in row.items() if isinstance(value, int | float)}
    mlflow.log_metrics({k: v for k, v in figures.items() if k != "step"}, step=row["step"])
