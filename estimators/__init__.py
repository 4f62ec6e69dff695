"""scikit-learn estimators that compare every sample with every other one and never store the table of pairs.

Another one, ``SplatPooling``, pools features of cameras into a bird's-eye-view grid.

Parameters, methods and fitted attributes have scikit-learn's names. float64 data is computed in float64, float32 in
float32, on the device that ``device`` names. Importing this package imports scikit-learn; importing kernops does not.
"""

from ._classification import KNeighborsClassifier
from ._density import KernelDensity
from ._gaussian_process import GaussianProcessRegressor
from ._gaussian_process_classifier import GaussianProcessClassifier
from ._kernel_ridge import KernelRidge
from ._neighbors import NearestNeighbors
from ._splat import SplatPooling

__all__ = [
    "GaussianProcessClassifier",
    "GaussianProcessRegressor",
    "KNeighborsClassifier",
    "KernelDensity",
    "KernelRidge",
    "NearestNeighbors",
    "SplatPooling",
]
