"""Objects that live in one process: pickling or copying them is refused, with the way out."""

from typing import NoReturn


class Unpicklable:
    """Base of what holds files, locks or threads; whatever refers to it, as a module does, cannot be pickled either."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: its files, memory and threads are this process's. In another "
            'process open the store again, with mode="r" if this one writes it. To save a model with its rows: '
            "tierstore.checkpoint.save(store, model); without them: its state_dict(). copy.deepcopy of a model "
            "shares its tables"
        )
