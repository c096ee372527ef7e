# SPDX-License-Identifier: Apache-2.0
"""The one error that a wrong steering request raises."""


class SteeringError(ValueError):
    """A steering request that cannot be served as asked.

    ``field`` is the path of the offending value, e.g. ``steering[2].tokens[1]``; ``problem`` is a
    sentence that says what is wrong and what to write instead.
    """

    field: str
    problem: str

    def __init__(self, field: str, problem: str) -> None:
        # Both go into `args`, so that the error survives pickling between processes.
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"
