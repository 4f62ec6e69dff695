"""SplatPooling: parameters and life cycle as scikit-learn wants them, numbers as the splat's definition."""

from __future__ import annotations

import linecache
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks

from kernops.estimators import SplatPooling
from kernops.geometric import BEVGrid, CameraRig, nuscenes_rig

GRID = BEVGrid((-48.0, 48.0, 4.0), (-24.0, 24.0, 4.0), (-5.0, 3.0, 4.0))
DEPTHS = [2.0, 5.0, 9.0, 14.0, 20.0]
FEATURES = (4, 11)
RIG = nuscenes_rig().resized(scale=0.44, crop=(140, 0))


def make(**parameters: Any) -> SplatPooling:
    return SplatPooling(GRID, DEPTHS, **{"feature_size": FEATURES, "device": "cpu", **parameters})


def sample(samples: int = 1, dtype: type = np.float64, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "depth": rng.random((samples, 6, len(DEPTHS), *FEATURES)).astype(dtype),
        "features": rng.random((samples, 6, *FEATURES, 3)).astype(dtype),
    }


def dense(X: dict[str, Any], share: np.ndarray | None = None, rounding: Any = np.floor) -> np.ndarray:
    """From the matrices of the rig to the sums, in NumPy's float64."""
    share = X["depth"].astype(float) if share is None else share
    u, v = np.linspace(0, 703, FEATURES[1]), np.linspace(0, 255, FEATURES[0])
    out = np.zeros((len(share), 3, 2, 12, 24))
    for camera, matrix in enumerate(RIG.projection()[0].numpy()):
        for k, depth in enumerate(DEPTHS):
            for r, row in enumerate(v):
                for c, column in enumerate(u):
                    ego = depth * matrix[:, :3] @ (column, row, 1) + matrix[:, 3]
                    x, y, z = rounding((ego - (-48, -24, -5)) / 4).astype(int)
                    if 0 <= x < 24 and 0 <= y < 12 and 0 <= z < 2:
                        out[:, :, z, y, x] += share[:, camera, k, r, c, None] * X["features"][:, camera, r, c]
    return out


# --- numbers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", ["auto", "cumsum", "atomic", "histogram"])
def test_pools_what_the_rig_sees(variant: str) -> None:
    X = sample()
    bev = make(variant=variant).fit(RIG).transform(X)
    assert isinstance(bev, np.ndarray)
    np.testing.assert_allclose(bev, dense(X), rtol=1e-12, atol=1e-12)


def test_rounding_toward_zero_adds_points() -> None:
    X = sample()
    floor, trunc = make().fit(RIG), make(rounding="trunc").fit(RIG)
    assert trunc.n_kept_ > floor.n_kept_
    np.testing.assert_allclose(trunc.transform(X), dense(X, rounding=np.trunc), rtol=1e-12, atol=1e-12)


def test_logits_and_weights() -> None:
    X = sample()
    X["weight"] = np.random.default_rng(1).random(X["depth"].shape)
    e = np.exp(X["depth"])
    want = dense(X, e / e.sum(2, keepdims=True) * X["weight"])
    np.testing.assert_allclose(make(depth_logits=True).fit(RIG).transform(X), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_rig_serves_any_number_of_samples(samples: int, weighted: bool) -> None:
    X = sample(samples)
    share = X["depth"]
    if weighted:
        X["weight"] = np.random.default_rng(1).random(share.shape)
        share = share * X["weight"]
    bev = make().fit(RIG).transform(X)
    assert bev.shape == (samples, 3, 2, 12, 24)
    np.testing.assert_allclose(bev, dense(X, share), rtol=1e-12, atol=1e-12)


def test_a_rig_of_several_samples() -> None:
    intrinsics, poses = (t.repeat(2, 1, 1, 1) for t in (RIG.intrinsics, RIG.cam_to_ego))
    rig = CameraRig(intrinsics, poses, (900, 1600)).resized(scale=0.44, crop=(140, 0))
    X, pooling = sample(2), make().fit(rig)
    np.testing.assert_allclose(pooling.transform(X), dense(X), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="depth must have the plan's shape"):
        pooling.transform(sample(3))


@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-12), (np.float32, 1e-5), (np.float16, 4e-3)])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_gives_what_it_gets(kind: str, dtype: type, bound: float) -> None:
    X = sample(2, dtype)
    given = X if kind == "numpy" else {name: torch.from_numpy(a) for name, a in X.items()}
    bev = make().fit(RIG).transform(given)
    assert type(bev) is (np.ndarray if kind == "numpy" else torch.Tensor)
    got = np.asarray(bev)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(float), dense(X), rtol=bound, atol=bound)


def test_tensors_have_gradients() -> None:
    """The sum of the result is linear in the features, and in the depth."""
    X = sample()
    tensors = {name: torch.from_numpy(a).requires_grad_() for name, a in X.items()}
    make().fit(RIG).transform(tensors).sum().backward()
    for tensor in tensors.values():
        assert tensor.grad is not None
        assert (tensor.grad * tensor).sum().item() == pytest.approx(dense(X).sum(), rel=1e-12)


def test_defaults_are_bevdets_grid_and_bins() -> None:
    """Numbers of points published with the rig: 59 bins, 16 x 44 features, 128 x 128 cells."""
    pooling = SplatPooling(device="cpu").fit(RIG)
    assert (pooling.n_points_, pooling.n_kept_) == (249_216, 139_087)
    assert pooling.grid_.shape == (1, 128, 128) and pooling.frustum_.feature_size == (16, 44)
    assert pooling.plan_.shape == (1, 1, 128, 128)
    assert SplatPooling(dbound=(1.0, 60.0, 0.5), device="cpu").fit(RIG).n_kept_ == 276_154


# --- scikit-learn -----------------------------------------------------------------------------------------------------
CHECKS = (
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_get_params_invariance",
    "check_set_params",
    "check_valid_tag_types",
    "check_mixin_order",
    "check_estimators_unfitted",
    "check_transformers_unfitted",
)


@pytest.mark.parametrize("name", CHECKS)
def test_scikit_learns_checks_that_need_no_table(name: str) -> None:
    """The others fit a table (n_samples, n_features), which this estimator refuses."""
    for estimator in (SplatPooling(), make()):
        getattr(estimator_checks, name)("SplatPooling", estimator)


def test_survives_clone_and_pickle() -> None:
    X, pooling = sample(), make(variant="histogram", rounding="trunc").fit(RIG)
    again = pickle.loads(pickle.dumps(pooling))
    assert np.array_equal(again.transform(X), pooling.transform(X))
    fresh = clone(pooling)
    assert fresh.get_params() == pooling.get_params() and not hasattr(fresh, "plan_")
    assert np.array_equal(fresh.fit(RIG).transform(X), pooling.transform(X))
    changed = clone(pooling).set_params(rounding="floor", depth_bins=None, dbound=(2.0, 12.0, 2.0))
    assert changed.fit(RIG).frustum_.shape == (5, *FEATURES)


def test_fit_leaves_parameters_alone() -> None:
    pooling = SplatPooling(device=None)
    before = dict(pooling.get_params())
    assert pooling.fit(RIG) is pooling
    assert pooling.get_params() == before


class Network(BaseEstimator):
    """Depth and features of images."""

    def fit(self, X: dict[str, Any], y: Any = None) -> Network:
        self.fitted_ = True
        return self

    def transform(self, X: dict[str, Any]) -> dict[str, Any]:
        return {"rig": X["rig"], **sample(len(X["images"]))}


def test_in_a_pipeline() -> None:
    flat = FunctionTransformer(lambda bev: bev.reshape(len(bev), -1))
    pipeline = Pipeline([("network", Network()), ("pool", make()), ("flat", flat)])
    X = {"images": np.zeros((2, 6)), "rig": RIG}
    rows = pipeline.fit_transform(X)
    np.testing.assert_allclose(rows, dense(sample(2)).reshape(2, -1), rtol=1e-12, atol=1e-12)
    assert np.array_equal(clone(pipeline).fit(X).transform(X), rows)
    pipeline.set_params(pool__rounding="trunc")
    assert not np.array_equal(pipeline.fit_transform(X), rows)


def test_another_calibration_warns_until_the_plan_is_refreshed() -> None:
    other = RIG.with_augmentation(bda=[[1.0, 0, 0], [0, -1, 0], [0, 0, 1]])
    pooling, X = make().fit(RIG), sample()
    with pytest.warns(UserWarning, match="another calibration"):
        pooling.transform({**X, "rig": other})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pooling.transform({**X, "rig": RIG})
        pooling.plan_.refresh(other)
        bev = pooling.transform({**X, "rig": other})
    np.testing.assert_allclose(bev, make().fit(other).transform(X))


@pytest.mark.parametrize("samples", [0, 1, 3])
def test_the_warning_is_one_and_points_at_the_caller(samples: int) -> None:
    other = RIG.with_augmentation(bda=[[1.0, 0, 0], [0, -1, 0], [0, 0, 1]])
    pooling, X = make().fit(RIG), {**sample(samples), "rig": other}
    pipeline = Pipeline([("pool", pooling)])
    for call in (pooling.transform, pipeline.transform):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(X)
        assert [(w.category, w.filename) for w in caught] == [(UserWarning, __file__)]
        assert linecache.getline(__file__, caught[0].lineno).strip() == "call(X)"


# --- bad input --------------------------------------------------------------------------------------------------------
BAD_PARAMETERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"variant": "sorted"}, ValueError, "variant of SplatPooling must be one of 'auto', 'cumsum'.*; got 'sorted'"),
    ({"rounding": "round"}, ValueError, "rounding .* 'floor', 'trunc'; got 'round'"),
    ({"depth_logits": "yes"}, ValueError, "depth_logits .* False, True; got 'yes'"),
    ({"backend": "gpu"}, ValueError, "backend .* 'tiled'; got 'gpu'"),
    ({"device": "gpu"}, ValueError, "device must be 'auto'"),
    ({"feature_size": 16}, TypeError, "feature_size must be two integers"),
    ({"depth_bins": [3.0, 2.0]}, ValueError, "depths must be finite, positive and increasing"),
    ({"depth_bins": None, "dbound": (1.0, 60.0)}, TypeError, "dbound must be three numbers"),
    ({"grid": (128, 128)}, TypeError, r"grid must be a BEVGrid or None; got \(128, 128\)"),
]


@pytest.mark.parametrize(("parameters", "error", "message"), BAD_PARAMETERS, ids=lambda v: "" if v is v else "")
def test_names_a_bad_parameter(parameters: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make().set_params(**parameters).fit(RIG)


@pytest.mark.parametrize("X", [np.zeros((4, 2)), {"depth": 1}, {"rig": "n015"}, None])
def test_fit_needs_a_rig(X: Any) -> None:
    with pytest.raises(TypeError, match="X must be a CameraRig, or a mapping with one as 'rig'; got"):
        make().fit(X)


def test_transform_needs_fit() -> None:
    estimator: BaseEstimator = make()
    with pytest.raises(NotFittedError):
        estimator.transform(sample())


BAD_DATA: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"depth": None}, ValueError, "X must have 'depth', 'features' and optionally 'weight' and 'rig'; got"),
    ({"weights": 1}, ValueError, "X must have .*; got 'depth', 'features', 'weights'"),
    ({"rig": "n015"}, TypeError, r"X\['rig'\] must be a CameraRig; got str"),
    ({"depth": [1.0]}, TypeError, r"X\['depth'\] must be a torch tensor, a NumPy array.*; got list"),
    ({"depth": np.zeros((1, 6, 5, 4, 11), int)}, TypeError, r"X\['depth'\] must be of dtype float16"),
    ({"depth": torch.zeros(1, 6, 5, 4, 11).double()}, ValueError, "one kind; got depth: torch, features: numpy"),
    ({"depth": np.zeros((1, 6, 5, 4, 11), np.float32)}, ValueError, "one dtype"),
    ({"depth": np.zeros((1, 6, 5, 4, 12))}, ValueError, r"depth must have the plan's shape .*got \(1, 6, 5, 4, 12\)"),
    (
        {"depth": np.zeros((2, 6, 5, 4, 11))},
        ValueError,
        r"one number B of samples; got shapes depth \(2, 6, 5, 4, 11\), features \(1, 6, 4, 11, 3\)",
    ),
    (
        {"weight": np.zeros((1, 6, 5, 4, 10))},
        ValueError,
        r"weight must have the shape of depth, \(1, 6, 5, 4, 11\); got \(1, 6, 5, 4, 10\)",
    ),
    ({"depth": torch.tensor(1.0).numpy()}, ValueError, r"got shapes depth \(\)"),
    ({"features": np.zeros((1, 6, 3, 4, 11))}, ValueError, "feat must have shape .*channels last"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_DATA, ids=[message[:20] for *_, message in BAD_DATA])
def test_names_bad_data(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make().fit(RIG).transform({**sample(), **change})


@pytest.mark.parametrize("weights", [0, 1, 2, 4])
@pytest.mark.parametrize("samples", [0, 1, 3])
def test_weights_of_other_samples(samples: int, weights: int) -> None:
    if samples == weights:
        return
    X = {**sample(samples), "weight": np.ones((weights, 6, len(DEPTHS), *FEATURES))}
    shapes = rf"weight must have the shape of depth, \({samples}, 6, 5, 4, 11\); got \({weights}, 6, 5, 4, 11\)"
    with pytest.raises(ValueError, match=shapes):
        make().fit(RIG).transform(X)


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("depth", np.zeros((1,)), "depth must have the plan's shape"),
        ("depth", np.zeros((1, 6, 5, 4, 12)), "depth must have the plan's shape"),
        ("depth", np.zeros((1, 6, 5, 4, 11), np.float32), "one dtype"),
        ("features", np.zeros((1, 3)), "feat must have shape .*channels last"),
        ("features", np.zeros((1, 6, 3, 4, 11)), "feat must have shape .*channels last"),
        ("weight", np.zeros((1, 6, 5, 4, 11), np.float32), "one dtype"),
    ],
)
def test_all_samples_are_checked_alike(name: str, value: np.ndarray, message: str, samples: int) -> None:
    X = {**sample(samples), name: np.repeat(value, samples, axis=0)}
    with pytest.raises(ValueError, match=message):
        make().fit(RIG).transform(X)


def test_no_samples_have_gradients() -> None:
    tensors = {name: torch.from_numpy(a).requires_grad_() for name, a in sample(0).items()}
    make(depth_logits=True).fit(RIG).transform(tensors).sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in tensors.values())


def test_data_must_be_a_mapping() -> None:
    with pytest.raises(TypeError, match="X must be a mapping with 'depth'.*; got ndarray"):
        make().fit(RIG).transform(np.zeros((4, 2)))
