"""The page of public names: signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from _tables import GENERATED

from kernops.lazy.methods import NOT_YET

#: Module -> its public names; ``None`` stands for its ``__all__``, or for what it defines itself.
MODULES: dict[str, tuple[str, ...] | None] = {
    "kernops": None,
    "kernops.estimators": None,
    "kernops.neighbors": ("knn",),
    "kernops.kernels": (
        *("kernel", "Kernel", "RBF", "Matern", "RationalQuadratic", "Periodic", "Cosine", "Linear", "DotProduct"),
        *("Polynomial", "Constant", "White", "Laplacian", "Cauchy", "PiecewisePolynomial", "SpectralMixture"),
        *("custom", "from_sklearn", "as_kernel"),
    ),
    "kernops.operators": None,
    "kernops.solvers": ("conjugate_gradients", "Solution"),
    "kernops.scipy": ("aslinearoperator",),
    "kernops.gpytorch": (
        *("RBFKernel", "MaternKernel", "RQKernel", "PeriodicKernel", "CosineKernel", "LinearKernel"),
        *("PolynomialKernel", "ConstantKernel", "PiecewisePolynomialKernel", "SpectralMixtureKernel"),
        *("RBFKernelGrad", "Matern52KernelGrad", "PolynomialKernelGrad", "RBFKernelGradGrad"),
        *("LaplacianKernel", "CauchyKernel", "FormulaKernel", "KernopsKernel"),
        *("ScaleKernel", "AdditiveKernel", "ProductKernel", "MultitaskKernel", "IndexKernel", "LCMKernel"),
        *("AdditiveStructureKernel", "ProductStructureKernel", "KernopsLinearOperator"),
        *("DerivativesLinearOperator", "as_linear_operator"),
    ),
    "kernops.geometric": (
        *("CameraRig", "nuscenes_rig", "Frustum", "frustum", "BEVGrid", "SplatPlan", "splat", "splat_features"),
        *("BucketPlan", "bucketed_sum", "bucketed_cumsum"),
    ),
    "kernops.geometric.compat": ("QuickCumsum", "cumsum_trick", "bev_pool", "bev_pool_v2"),
    "kernops.geometric.deploy": ("export_onnx", "with_functions", "strip_functions"),
    "kernops.formula.parser": ("parse",),
    "kernops.backends": ("reduce",),
}

PAGE = """# Public names

{generated}

{contents}

{modules}
"""


def public_names(module: str) -> list[str]:
    """The names of ``module`` that the page shows."""
    found = importlib.import_module(module)
    names = MODULES[module] or [n for n in found.__all__ if not n.startswith("_")]
    return list(names)


def api_page() -> str:
    blocks, contents = [], []
    for module in MODULES:
        names = public_names(module)
        contents.append(f"- `{module}`: " + ", ".join(f"[`{n}`](#{_anchor(module, n)})" for n in names))
        blocks += [_entry(module, name) for name in names]
    return PAGE.format(
        generated=GENERATED.format("the docstrings"), contents="\n".join(contents), modules="\n\n".join(blocks)
    )


def _heading(module: str, name: str) -> str:
    return f"{module}.{name}"


def _anchor(module: str, name: str) -> str:
    """As GitHub makes it of the heading."""
    return re.sub(r"[^\w-]", "", _heading(module, name).lower())


def _entry(module: str, name: str) -> str:
    thing = getattr(importlib.import_module(module), name)
    parts = [f"## `{_heading(module, name)}`", _source(thing), _signature(name, thing), docstring(thing)]
    if inspect.isclass(thing):
        parts += [_member(name, *member) for member in members(thing)]
    return "\n\n".join(p for p in parts if p)


def _source(thing: Any) -> str:
    module = inspect.getmodule(thing)
    path = module.__name__.replace(".", "/") if module else ""
    if module is not None and getattr(module, "__path__", None):
        path += "/__init__"
    return f"Defined in `{path}.py`." if path else ""


def members(cls: type) -> list[tuple[str, Any]]:
    """Public methods and properties that the class or a base of ours defines, in alphabetical order.

    Those of a base that has an entry of its own are said there.
    """
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] == "kernops" and (base is cls or not _has_entry(base)):
            found.update({n: m for n, m in vars(base).items() if _documentable(n, m)})
    return sorted(found.items(), key=lambda item: item[0].lower())


def _has_entry(cls: type) -> bool:
    return any(getattr(importlib.import_module(m), n) is cls for m in MODULES for n in public_names(m))


def _documentable(name: str, member: Any) -> bool:
    """Not what is private, only says that it is not available, or repeats a method by PyKeOps' second name."""
    if name.startswith("_") or name in NOT_YET or name.endswith("_reduction"):
        return False
    return callable(member) or isinstance(member, (property, staticmethod, classmethod))


def _member(owner: str, name: str, member: Any) -> str:
    if isinstance(member, property):
        text = first_paragraph(member)
        return f"**`{owner}.{name}`** (property) {text}".rstrip()
    function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
    text = docstring(function)
    one = f"**`{_call(f'{owner}.{name}', function)}`**"
    return one + (f"\n\n{text}" if "\n" in text else f" – {text}" if text else "")


def first_paragraph(thing: Any) -> str:
    return " ".join(docstring(thing).partition("\n\n")[0].split())


def docstring(thing: Any) -> str:
    """The docstring in Markdown: sections as bold words, double backquotes as single ones."""
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    text = re.sub(r":(?:func|class|meth|mod|attr):`~?([^`]*)`", r"`\1`", text).replace("``", "`")
    text = text.replace("(*B", "(\\*B")  # a shape, not the begin of italics
    return "\n\n".join(_section(part) for part in text.split("\n\n"))


def _section(part: str) -> str:
    """A Google-style section as a list; anything else as it is."""
    head, _, rest = part.partition("\n")
    if not re.fullmatch(r"(Args|Attributes|Returns|Raises|Warns|Example|Examples|Yields|Note):", head) or not rest:
        return part
    lines = inspect.cleandoc(rest).splitlines()
    title = f"**{head[:-1]}**"
    if head.startswith("Example"):
        return f"{title}\n\n```pycon\n" + "\n".join(lines) + "\n```"
    if head[:-1] not in ("Args", "Attributes", "Raises", "Warns"):
        return f"{title}\n\n" + " ".join(line.strip() for line in lines)
    items: list[str] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1] += " " + line.strip()
        else:
            name, colon, text = line.partition(": ")
            items.append(f"- `{name.strip('`')}`: {text}" if colon else f"- {line}")
    return f"{title}\n\n" + "\n".join(items)


def _call(name: str, thing: Any) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return name + str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _signature(name: str, thing: Any) -> str:
    return f"```\n{_call(name, thing)}\n```"
