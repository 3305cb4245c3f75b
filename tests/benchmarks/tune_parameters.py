"""Tune the parameters for large tables, ``many`` in predictor/data/parameters.toml.

Run: python tests/benchmarks/tune_parameters.py [TRIALS]

Needs Optuna (not a dependency of the package). Only networks of the tuning half are used, those whose name has an even
CRC-32, so that no parameter is tuned on the other half. The loss is the mean absolute log error over five splits, each
with three folds.
"""

import sys
import zlib

import numpy as np
import optuna

from precision_time.predictor.learning.boosting import boost, choose_parameters
from precision_time.predictor.learning.splits import SPLITS, split_by_group
from precision_time.predictor.learning.trees import flatten_xgboost
from precision_time.predictor.rows.features import SETUP_FEATURES, feature_matrix
from precision_time.predictor.rows.observations import Observation, observe_table, weigh_rows
from precision_time.predictor.rows.public_table import load_public_table

TUNED_SPLITS = ("configuration", "source-model-gpu", "leave-model-out", "leave-family-out", "leave-gpu-out")
FOLDS = 3
SEED = 1


def in_tuning_half(observation: Observation) -> bool:
    """Whether the network of a row may be tuned on."""
    return zlib.crc32(observation.network.encode()) % 2 == 0


def main(trials: int) -> None:
    """Search, and print the best parameters as TOML."""
    observations, _ = observe_table(load_public_table().kept)
    rows = [observation for observation in observations if in_tuning_half(observation)]
    matrix = feature_matrix([row.query.row for row in rows], SETUP_FEATURES)
    residual = np.log([row.measurement.iteration_time_s / row.closed.iteration_time_s for row in rows])
    weights = weigh_rows(rows)
    folds = [split_by_group([SPLITS[name].group(row) for row in rows], folds=FOLDS, seed=SEED) for name in TUNED_SPLITS]
    print(f"{len(rows)} rows of {len(observations)}", flush=True)

    def loss(trial: optuna.Trial) -> float:
        parameters = choose_parameters(len(observations)) | {
            "rounds": trial.suggest_int("rounds", 300, 1200, step=100),
            "max_depth": trial.suggest_int("max_depth", 3, 8),
            "eta": trial.suggest_float("eta", 0.02, 0.12, log=True),
            "min_child_weight": trial.suggest_float("min_child_weight", 1.0, 20.0, log=True),
            "lambda": trial.suggest_float("lambda", 0.3, 20.0, log=True),
            "subsample": trial.suggest_float("subsample", 0.5, 0.95),
            "colsample_bytree": trial.suggest_float("colsample_bytree", 0.1, 0.8),
            "huber_slope": trial.suggest_float("huber_slope", 0.05, 0.5, log=True),
        }
        errors = []
        for split, numbers in zip(TUNED_SPLITS, folds, strict=True):
            of_split = []
            for number in range(FOLDS):
                train = numbers != number
                model = boost(matrix[train], residual[train], parameters=parameters, seed=SEED, weights=weights[train])
                predicted = flatten_xgboost(model, keep_cover=False).predict(matrix[~train])
                of_split.append(np.abs(residual[~train] - predicted))
            errors.append(float(np.concatenate(of_split).mean()))
            trial.set_user_attr(split, errors[-1])
            trial.report(float(np.mean(errors)), len(errors))
        return float(np.mean(errors))

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED))
    searched = ("rounds", "max_depth", "eta", "min_child_weight", "lambda", "subsample", "colsample_bytree",
                "huber_slope")  # fmt: skip
    study.enqueue_trial({name: choose_parameters(len(observations))[name] for name in searched})
    study.optimize(
        loss,
        n_trials=trials,
        callbacks=[lambda _, trial: print(trial.number, trial.value, trial.params, trial.user_attrs, flush=True)],
    )
    print(f"# loss {study.best_value:.4f}")
    for name, value in study.best_params.items():
        print(f"{name} = {value:.3g}" if isinstance(value, float) else f"{name} = {value}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
