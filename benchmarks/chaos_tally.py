"""What the disturbances of the chaos suite came to."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.record import spread


@dataclass
class Tally:
    """How many disturbances of each kind were made, and their outcome."""

    disturbances: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    """SIGKILLs of a rank, of all ranks or of torchrun that were asked for; other disturbances may kill too."""
    moments: Counter[str] = field(default_factory=Counter)
    """When the kills happened: during a save, between saves, before the first step."""
    steps_lost: list[int] = field(default_factory=list)
    """Steps trained and not saved when a kill happened, as far as they were logged."""
    restart_s: list[float] = field(default_factory=list)
    orphans_ended_s: list[float] = field(default_factory=list)
    runs: int = 0
    ended_bitwise_equal: int = 0
    commands_given: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the counts of `other`."""
        self.disturbances.update(other.disturbances)
        self.kills += other.kills
        self.moments.update(other.moments)
        for name in ("steps_lost", "restart_s", "orphans_ended_s", "failures"):
            getattr(self, name).extend(getattr(other, name))
        self.runs += other.runs
        self.ended_bitwise_equal += other.ended_bitwise_equal
        self.commands_given += other.commands_given

    def report(self) -> dict[str, Any]:
        """The tally as JSON values."""
        lists = {"restart_s": self.restart_s, "orphans_ended_s": self.orphans_ended_s}
        return {
            "disturbances": dict(sorted(self.disturbances.items())),
            "kills": self.kills,
            "moments_of_kills": dict(self.moments),
            "steps_lost": spread([float(lost) for lost in self.steps_lost]) if self.steps_lost else None,
            **{name: spread(values) if values else None for name, values in lists.items()},
            "runs": self.runs,
            "ended_bitwise_equal": self.ended_bitwise_equal,
            "commands_given": self.commands_given,
            "failures": self.failures,
        }
