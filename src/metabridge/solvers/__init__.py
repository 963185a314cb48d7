"""Inner solvers: how a method adapts to the support set of one task.

Importing this package imports all its modules, and each solver class registers itself in `Solver.registry`. To add a
solver, add a module: `metabridge.solvers` then exports its class.
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
globals().update({cls.__name__: cls for cls in Solver.registry.values()})
__all__ += [cls.__name__ for cls in Solver.registry.values() if cls.__name__ not in __all__]
