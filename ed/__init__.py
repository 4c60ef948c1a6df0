"""Effective degree: how simple a network is, and a penalty that makes it simpler.

    import ed
    print(ed.estimate(model, images))                     # measure any module on your data
    loss = task_loss + 7 * ed.penalty(model, x, labels)   # penalise it, label-anchored

Both take a module, a function, or a `Field`: a network from some inner space on, e.g. the word
embeddings of a text classifier; and the settings of a `Representation`, one by one
(`components=3`) or as one object. `estimate` returns an `Estimate`: mean, standard error, the value
of each path, and the spectrum of coefficients.

The steps by themselves: samplers of nodes (`RandomizedCosine`, `ChebyshevNodes`, `UniformNodes`,
`StratifiedNodes`), bases (`chebyshev`, `legendre`), `fit`, `principal_scores`, and coefficients to
degree (`effective_degree`, `normalised_degree`, `quadratic_degree`). `Paths` is for a loss that
shares one forward pass with its penalty.
"""

import importlib

__version__ = "0.1.0"

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
    "Estimate": "ed.core.estimator",
    "estimate": "ed.core.estimator",
    "LoadedRun": "ed.engine.main",
    "load_run": "ed.engine.main",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ed' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
