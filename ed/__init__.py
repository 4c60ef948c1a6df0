"""Effective degree (ED): measure how simple a network is, and train it to be simpler.

    import ed
    print(ed.estimate(model, images))                     # measure any model on your data
    loss = task_loss + 7 * ed.penalty(model, x, labels)   # penalise it during training

Both accept a module, a function, or a `Field`, which can start inside a network, e.g. at word
embeddings. Pass fit settings as keywords (`components=3`) or as a `Representation`.
`estimate` returns an `Estimate` with mean, standard error, values per path, and spectrum. `compare`
measures two models on the same paths, and `load_run` loads a run folder of `train.py`.

Building blocks: samplers (`RandomizedCosine`, `ChebyshevNodes`, `UniformNodes`, `StratifiedNodes`),
bases (`chebyshev`, `legendre`), `fit`, `principal_scores`, and degrees (`effective_degree`,
`normalised_degree`, `quadratic_degree`). `Paths` lets loss and penalty share one forward pass.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time, `__getattr__` resolves these names
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

# Resolved on first use, so that `import ed` does not load torch.
_MODULES = {
    "ed.core.bases": "chebyshev legendre",
    "ed.core.degree": "effective_degree normalised_degree quadratic_degree",
    "ed.core.estimator": "compare estimate",
    "ed.core.field": "Field",
    "ed.core.fit": "fit",
    "ed.core.nodes": "ChebyshevNodes RandomizedCosine StratifiedNodes UniformNodes",
    "ed.core.pca": "principal_scores",
    "ed.core.penalty": "Paths penalty",
    "ed.core.representation": "Representation",
    "ed.core.result": "Comparison Estimate",
    "ed.engine.main": "LoadedRun load_run",
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names.split()}
# without the extra `train`, leaves out what needs it: `help` and completion load every name
__all__ = sorted(n for n, m in _EXPORTS.items() if m.startswith("ed.core") or find_spec("hydra"))


if not TYPE_CHECKING:  # type checkers would otherwise accept any name

    def __getattr__(name: str):
        if name not in _EXPORTS:
            raise AttributeError(f"module 'ed' has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(_EXPORTS[name]), name)
        except ModuleNotFoundError as error:
            from ed.runtime.extras import missing_package

            if (reason := missing_package(error)) is None:
                raise
            raise ModuleNotFoundError(f"ed.{name}: {reason}", name=error.name) from error


def __dir__() -> list[str]:
    return [*globals(), *__all__]
