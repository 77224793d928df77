"""Train on the irises that come with scikit-learn: train.py FILE."""

import pickle
import sys
from pathlib import Path

from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

irises = load_iris()
model = make_pipeline(StandardScaler(), LogisticRegression())
model.fit(irises.data, irises.target_names[irises.target])
Path(sys.argv[1]).write_bytes(pickle.dumps(model))
