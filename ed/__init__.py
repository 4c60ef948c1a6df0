"""Effective degree: how simple a network is, and a penalty that makes it simpler.

    import ed
    print(ed.estimate(model, images))                     # measure any module on your data
    loss = task_loss + 7 * ed.penalty(model, x, labels)   # penalise it, label-anchored

Both take a module, a function, or a `Field`: a network from some inner space on, e.g. the word
embeddings of a text classifier; and the settings of a `Representation`, one by one
(`components=3`) or as one object. `estimate` returns an `Estimate`: mean, standard error, the value
of each path, and the spectrum of coefficients. `compare` measures two models on the same paths.

The steps by themselves: samplers of nodes (`RandomizedCosine`, `ChebyshevNodes`, `UniformNodes`,
`StratifiedNodes`), bases (`chebyshev`, `legendre`), `fit`, `principal_scores`, and coefficients to
degree (`effective_degree`, `normalised_degree`, `quadratic_degree`). `Paths` is for a loss that
shares one forward pass with its penalty. `load_run` opens a run folder of `train.py`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers; at run time `__getattr__` resolves these names
    from ed.core.bases import chebyshev as chebyshev
    from ed.core.bases import legendre as legendre
    from ed.core.degree import effective_degree as effective_degree
    from ed.core.degree import normalised_degree as normalised_degree
    from ed.core.degree import quadratic_degree as quadratic_degree
    from ed.core.estimator import compare as compare
    from ed.core.estimator import estimate as estimate
    from ed.core.field import Field as Field
    from ed.core.fit import fit as fit
    from ed.core.nodes import ChebyshevNodes as ChebyshevNodes
    from ed.core.nodes import RandomizedCosine as RandomizedCosine
    from ed.core.nodes import StratifiedNodes as StratifiedNodes
    from ed.core.nodes import UniformNodes as UniformNodes
    from ed.core.pca import principal_scores as principal_scores
    from ed.core.penalty import Paths as Paths
    from ed.core.penalty import penalty as penalty
    from ed.core.representation import Representation as Representation
    from ed.core.result import Comparison as Comparison
    from ed.core.result import Estimate as Estimate
    from ed.engine.main import LoadedRun as LoadedRun
    from ed.engine.main import load_run as load_run

__version__ = "0.2.0"

# Resolved on first use: `import ed` must not load torch for those who only read tables.
_EXPORTS = {
    "chebyshev": "ed.core.bases",
    "legendre": "ed.core.bases",
    "ChebyshevNodes": "ed.core.nodes",
    "RandomizedCosine": "ed.core.nodes",
    "StratifiedNodes": "ed.core.nodes",
    "UniformNodes": "ed.core.nodes",
    "fit": "ed.core.fit",
    "effective_degree": "ed.core.degree",
    "normalised_degree": "ed.core.degree",
    "quadratic_degree": "ed.core.degree",
    "principal_scores": "ed.core.pca",
    "Field": "ed.core.field",
    "Paths": "ed.core.penalty",
    "penalty": "ed.core.penalty",
    "Representation": "ed.core.representation",
    "Comparison": "ed.core.result",
    "Estimate": "ed.core.result",
    "compare": "ed.core.estimator",
    "estimate": "ed.core.estimator",
    "LoadedRun": "ed.engine.main",
    "load_run": "ed.engine.main",
}
__all__ = sorted(_EXPORTS)


if not TYPE_CHECKING:  # with it, type checkers would accept any name

    def __getattr__(name: str):
        if name not in _EXPORTS:
            raise AttributeError(f"module 'ed' has no attribute {name!r}")
        return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
