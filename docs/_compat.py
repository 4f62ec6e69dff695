"""What of the neighbouring libraries' features is there: one table of statuses, which a test holds against the package.

A row with names is "yes" where all of them exist, "partly" where some do, "not yet" where none does. A row without
names, for what no attribute shows, names the test that proves it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from _tables import GENERATED, table

from kernops.lazy.methods import NOT_YET as NOT_YET_METHODS

YES, PARTLY, NOT_YET = "yes", "partly", "not yet"


@dataclass(frozen=True)
class Row:
    """One feature.

    Attributes:
        feature: in words.
        status: ``YES``, ``PARTLY`` or ``NOT_YET``.
        names: attributes below ``kernops`` that are the feature, separated by spaces; a leading ``.`` stands for
            ``LazyTensor``.
        test: a file under ``tests/`` that shows a feature without names.
        note: what a user should know.
        more: whether no other library of the comparison has it.
    """

    feature: str
    status: str
    names: str = ""
    test: str = ""
    note: str = ""
    more: bool = False

    @property
    def paths(self) -> list[str]:
        return ["LazyTensor" + n if n.startswith(".") else n for n in self.names.split()]

    @property
    def missing(self) -> list[str]:
        """The names that do not exist."""
        return [path for path in self.paths if not exists(path)]


def exists(path: str) -> bool:
    """Whether ``kernops.<path>`` exists, importing submodules on the way."""
    owner, _, method = path.partition(".")
    if owner == "LazyTensor" and method in NOT_YET_METHODS:  # they exist, and say so
        return False
    thing = importlib.import_module("kernops")
    where = "kernops"
    for part in path.split("."):
        where += "." + part
        if getattr(thing, part, None) is getattr(object, part, None):  # absent, or what every object has
            try:
                thing = importlib.import_module(where)
            except ImportError:
                return False
        else:
            thing = getattr(thing, part)
    return True


SECTIONS: dict[str, tuple[Row, ...]] = {
    "Variables": (
        Row("`LazyTensor(x)` with shape inference, `Vi`, `Vj`, `Pm`", YES, "LazyTensor Vi Vj Pm"),
        Row("symbolic `Vi(ind, dim)`, calls later", YES, ".__call__"),
        Row("NumPy, torch and CuPy arrays in one class", YES, test="lazy/test_inputs.py", more=True),
        Row("`Genred` with formula strings, parsed and never evaluated", YES, "Genred"),
        Row("`.shape .dtype .dim .ndim .nbatchdims`", YES, ".shape .dtype .dim .ndim .nbatchdims"),
        Row("generic_sum, generic_logsumexp, generic_argmin, generic_argkmin", NOT_YET,
            "generic_sum generic_logsumexp generic_argmin generic_argkmin", note="`Genred` does what they do"),
    ),
    "Element-wise operations": (
        Row("`+ - * / **`, unary `-`", YES, ".__add__ .__sub__ .__mul__ .__truediv__ .__pow__ .__neg__"),
        Row("`== != < <= > >=`", YES, ".__eq__ .__ne__ .__lt__ .__le__ .__gt__ .__ge__"),
        Row("exp, log, roots and powers", YES, ".exp .log .xlogx .sqrt .rsqrt .power .square .inv"),
        Row("trigonometry", YES, ".sin .cos .asin .acos .atan .atan2 .sinc .sinxdivx"),
        Row("abs, sign, step, relu, clamp, ifelse, mod, round, floor", YES,
            ".abs .sign .step .relu .clamp .ifelse .mod .round .floor"),
        Row("bspline", NOT_YET, ".bspline"),
        Row("hyperbolic functions, error functions, gamma", YES,
            ".tan .tanh .sinh .cosh .erf .erfc .lgamma .digamma", more=True),
        Row("stable exponentials and logarithms", YES,
            ".exp2 .expm1 .log1p .log2 .sigmoid .softplus .logaddexp", more=True),
        Row("where, heaviside, minimum, maximum", YES, ".where .heaviside .minimum .maximum", more=True),
    ),
    "Vector operations": (
        Row("`|` (scalar product), norms and distances", YES,
            ".__or__ .sqnorm2 .norm2 .norm .normalize .sqdist .weightedsqnorm .weightedsqdist"),
        Row("components, slices and concatenation", YES,
            ".__getitem__ .elem .extract .one_hot .concat .cat .concatenate"),
        Row("sum, max, min over the vector", YES, ".sum .max .min"),
        Row("products of matrices and vectors", YES,
            ".matvecmult .vecmatmult .tensorprod .keops_tensordot .keops_kron"),
        Row("difference_matrix", YES, ".difference_matrix"),
        Row("softdtw_sqdist", NOT_YET, ".softdtw_sqdist"),
    ),
    "Derivatives inside formulas": (
        Row("grad, diff, grad_matrix, divergence, laplacian, trace_operator", YES,
            ".grad .diff .grad_matrix .divergence .laplacian .trace_operator"),
        Row("factorize, auto_factorize", YES, ".factorize .auto_factorize",
            note="equal parts are shared anyway; these return the formula as it is"),
    ),
    "Complex numbers": (
        Row("real2complex, imag2complex, exp1j and complex arithmetic", YES,
            ".real2complex .imag2complex .exp1j lazy.ComplexLazyTensor.real lazy.ComplexLazyTensor.imag "
            "lazy.ComplexLazyTensor.conj lazy.ComplexLazyTensor.angle",
            note="sums and `@` only; other reductions of complex vectors are not there yet"),
    ),
    "Reductions": (
        Row("sum, logsumexp, sumsoftmaxweight, `@`", YES, ".sum .logsumexp .sumsoftmaxweight .__matmul__"),
        Row("min, max and their indices", YES, ".min .argmin .min_argmin .max .argmax .max_argmax"),
        Row("the K smallest", YES, ".Kmin .argKmin .Kmin_argKmin"),
        Row("matvec, rmatvec, t, T", YES, ".matvec .rmatvec .t .T"),
        Row("`.solve` and `KernelSolve` by conjugate gradients", YES, ".solve KernelSolve"),
        Row("the K largest", YES, ".Kmax .argKmax .Kmax_argKmax", more=True),
        Row("mean, var, std, any, all, count_nonzero", YES, ".mean .var .std .any .all .count_nonzero", more=True),
        Row("softmax, applied with `@`", YES, ".softmax", more=True),
        Row("several reductions of one formula in one pass", NOT_YET, more=True),
    ),
    "Derivatives": (
        Row("`torch.autograd` to any order", YES, test="autograd/test_gradients.py"),
        Row("`torch.func`: grad, jvp, vjp, hessian, vmap", YES, test="autograd/test_transforms.py"),
        Row("gradients of min, max and of the K smallest", YES, test="autograd/test_gradients.py", more=True),
        Row("`torch.compile(fullgraph=True)`", YES, test="autograd/test_transforms.py", more=True),
        Row("`torch.export`", NOT_YET, more=True),
    ),
    "Sizes, dtypes, sparsity": (
        Row("batch dimensions with broadcasting", YES, test="lazy/test_batches.py"),
        Row("float16, float32, float64", YES, test="backends/test_dispatch.py"),
        Row("bfloat16", YES, test="backends/test_dispatch.py", more=True),
        Row("sums always compensated", YES, test="backends/test_reductions.py", note="no switch for the scheme"),
        Row("block-sparse `ranges` and the cluster functions", NOT_YET,
            "cluster.grid_cluster cluster.sort_clusters cluster.cluster_ranges cluster.from_matrix"),
        Row("high dimension on matrix units", YES, test="codegen/test_matrix.py", more=True),
    ),
    "Compiled code": (
        Row("compiled once, kept on disk, keyed by everything that changes it, safe between processes", YES,
            test="backends/test_cache.py"),
        Row("`python -m kernops cache`", YES, "backends.cache.entries backends.cache.clear", more=True),
        Row("CUDA without nvcc and without a host compiler", YES, "backends.cuda", more=True),
        Row("works with neither compiler nor CuPy", YES, "backends.tiled", more=True),
        Row("the same bits on every run", YES, test="backends/test_invariance.py", more=True),
    ),
    "On top of the engine": (
        Row("exact nearest neighbours on arrays, in 14 metrics or any formula", YES, "neighbors.knn"),
        Row("kernels by name", YES, "kernels.kernel"),
        Row("kernels as objects, with `+ * **`, features and batches; scikit-learn's translated", YES,
            "kernels.Kernel kernels.custom kernels.from_sklearn", more=True),
        Row("scikit-learn estimators", PARTLY,
            "estimators.KernelDensity estimators.KNeighborsClassifier estimators.NearestNeighbors "
            "estimators.KernelRidge estimators.KNeighborsRegressor estimators.RadiusNeighborsClassifier "
            "estimators.DBSCAN estimators.KMeans estimators.GaussianProcessRegressor estimators.Nystroem"),
        Row("radius search", NOT_YET, "neighbors.radius"),
        Row("linear operators, with solutions, determinants, samples and eigenpairs that are differentiable", YES,
            "operators.KernelOperator.solve operators.KernelOperator.inv_quad_logdet operators.KernelOperator.eigsh "
            "operators.KernelOperator.sqrt_matmul operators.KroneckerOperator operators.BlockDiagonalOperator",
            more=True),
        Row("preconditioners: pivoted Cholesky, randomised Nyström, Cholesky of the stored matrix", YES,
            "operators.make_preconditioner", more=True),
        Row("Gaussian process regression with scikit-learn's kernels and interface, beyond a dense matrix", YES,
            "estimators.GaussianProcessRegressor", more=True),
        Row("Gaussian process classification by Laplace's approximation, with a matrix-free Newton method", YES,
            "estimators.GaussianProcessClassifier operators.RescaledOperator", more=True),
        Row("progress of fits: scikit-learn's callbacks, which may end them, tqdm, lines", YES,
            test="estimators/test_progress.py", note="callbacks with scikit-learn 1.9 and later", more=True),
        Row("runs out of memory explained, smaller tiles or conjugate gradients instead", YES,
            "operators.OutOfMemoryError", more=True),
        Row("GPyTorch kernels: its names, arguments, priors, state dicts; no dense fallback, gradients by points", YES,
            "gpytorch.RBFKernel gpytorch.MaternKernel gpytorch.RQKernel gpytorch.PeriodicKernel gpytorch.CosineKernel "
            "gpytorch.LinearKernel gpytorch.PolynomialKernel gpytorch.ConstantKernel "
            "gpytorch.PiecewisePolynomialKernel gpytorch.SpectralMixtureKernel",
            note="`PiecewisePolynomialKernel(q=2)` is as GPyTorch documents it, not as it computes it"),
        Row("GPyTorch kernels of any formula, Laplacian, Cauchy", YES,
            "gpytorch.FormulaKernel gpytorch.LaplacianKernel gpytorch.CauchyKernel", more=True),
        Row("sums, products and multiples of GPyTorch kernels as one formula; several tasks", YES,
            "gpytorch.ScaleKernel gpytorch.AdditiveKernel gpytorch.ProductKernel gpytorch.MultitaskKernel "
            "gpytorch.IndexKernel gpytorch.ProductStructureKernel", more=True),
        Row("`linear_operator.LinearOperator` of a kernel's matrix", YES,
            "gpytorch.KernopsLinearOperator gpytorch.as_linear_operator"),
        Row("GPyTorch kernels of derivatives", YES,
            "gpytorch.RBFKernelGrad gpytorch.Matern52KernelGrad gpytorch.PolynomialKernelGrad "
            "gpytorch.RBFKernelGradGrad", test="gpytorch/test_derivatives.py",
            note="no dense matrix; second derivatives also for points of two numbers"),
        Row("covariances of derivatives by any smooth kernel", YES, "operators.DerivativesOperator",
            test="operators/test_derivatives.py", more=True),
        Row("`aslinearoperator` for SciPy", YES, "scipy.aslinearoperator"),
    ),
    "Bird's-eye-view pooling (against LSS, BEVFusion, BEVDet, BEVDepth, CUDA-BEVFusion, DerryHub, Autoware, conch)": (
        Row("depth times feature fused, forward and backward: no frustum tensor", YES, "geometric.splat"),
        Row("pooling of a frustum tensor that is there", YES, "geometric.splat_features"),
        Row("batch, several levels of height and non-square grids together", YES, test="geometric/test_splat.py"),
        Row("image-space and BEV-space augmentation", YES,
            "geometric.CameraRig.with_augmentation geometric.CameraRig.resized"),
        Row("sums without cancellation", YES, test="geometric/test_splat.py"),
        Row("variants cumsum, atomic, histogram and auto, by name", YES, test="geometric/test_plan.py", more=True),
        Row("float16 and bfloat16 in, float32 accumulation", YES, test="geometric/test_kernels.py"),
        Row("the same bits each time", YES, test="geometric/test_splat.py",
            note="`atomic` on a GPU: up to rounding"),
        Row("a new calibration without rebuilding anything", YES, "geometric.SplatPlan.refresh"),
        Row("rounding down, and toward zero as the public implementations do", YES, test="geometric/test_cells.py",
            more=True),
        Row("checks of ranges and shapes, empty inputs, the caller's stream, no shared scratch", YES,
            test="geometric/test_splat.py"),
        Row("softmax of depth logits fused in; a weight for each point", YES, test="geometric/test_splat.py",
            more=True),
        Row("second derivatives", YES, test="geometric/test_splat.py", more=True),
        Row("a report of what falls where, and a picture", YES, "geometric.SplatPlan.report geometric.SplatPlan.plot",
            more=True),
        Row("the same operator on a processor, compiled or in torch", YES,
            "geometric.kernels.cpu geometric.kernels.tiled"),
        Row("`torch.library` operator, `torch.compile`, `torch.export`", YES, test="geometric/test_operator.py",
            more=True),
        Row("ONNX node with a body that onnxruntime runs", YES,
            "geometric.deploy.export_onnx geometric.deploy.with_functions geometric.deploy.strip_functions", more=True),
        Row("rewriting of ONNX graphs that others exported", NOT_YET),
        Row("TensorRT plugin", NOT_YET),
        Row("scikit-learn transformer", YES, "estimators.SplatPooling", more=True),
        Row("functions with the signatures of LSS, BEVFusion and BEVDet", YES,
            "geometric.compat.QuickCumsum geometric.compat.cumsum_trick geometric.compat.bev_pool "
            "geometric.compat.bev_pool_v2", more=True),
        Row("sums and running sums by bucket", YES,
            "geometric.BucketPlan geometric.bucketed_sum geometric.bucketed_cumsum", more=True),
    ),
}  # fmt: skip

PAGE = """# Compatibility

{generated}

What PyKeOps 2.3 and its neighbours have, and what of it is here. A script written for `pykeops.torch.LazyTensor` or
`pykeops.numpy.LazyTensor` needs only another import:

```python
from kernops import LazyTensor  # instead of: from pykeops.torch import LazyTensor
```

★ marks what PyKeOps does not have and, for bird's-eye-view pooling, what none of the systems named there has. "Partly"
lists what is missing.

{sections}
"""


def rows() -> Iterator[Row]:
    for section in SECTIONS.values():
        yield from section


def _cells(row: Row) -> tuple[str, str, str]:
    note = row.note
    if row.status == PARTLY:
        missing = "not yet: " + ", ".join(f"`{path.rpartition('.')[2]}`" for path in row.missing)
        note = f"{note}; {missing}" if note else missing
    return row.feature + (" ★" if row.more else ""), row.status, note


def compatibility_page() -> str:
    parts = [
        f"## {title}\n\n" + table(("Feature", "There", "Note"), [_cells(row) for row in section])
        for title, section in SECTIONS.items()
    ]
    return PAGE.format(generated=GENERATED.format("`docs/_compat.py`"), sections="\n\n".join(parts))
