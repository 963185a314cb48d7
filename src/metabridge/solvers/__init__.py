"""Inner solvers: how a method adapts to the support set of one task.

All modules of this package are imported, and each solver registers itself in `Solver.registry`. A new solver is a new
module; `metabridge.solvers` exports its class without further changes.
"""

from metabridge.registry import import_modules
from metabridge.solvers.gradient_descent import GradientDescent
from metabridge.solvers.problem import Loss, Problem, task_loss
from metabridge.solvers.proximal import Proximal
from metabridge.solvers.ridge_solver import RidgeSolver
from metabridge.solvers.solver import IterativeSolver, Rates, Solver
from metabridge.solvers.svm_solver import SVMSolver

__all__ = [
    "GradientDescent",
    "IterativeSolver",
    "Loss",
    "Problem",
    "Proximal",
    "Rates",
    "RidgeSolver",
    "SVMSolver",
    "Solver",
    "task_loss",
]

import_modules(__name__, __path__)
globals().update({kind.__name__: kind for kind in Solver.registry.values()})
__all__ += [kind.__name__ for kind in Solver.registry.values() if kind.__name__ not in __all__]
