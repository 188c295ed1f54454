"""The field image_data of /generate: the images of each prompt."""

from __future__ import annotations

from ..edge.errors import BadField
from .intake import ImageIntake
from .pictures import SentPicture

_FIELD = "image_data"


def read_image_data(given: object, count: int, is_batch: bool, images: ImageIntake) -> list[list[SentPicture]]:
    """Return the images of each prompt, as they came; no lists where there is no image at all.

    given: as SGLang reads it: one image; a list of those of one prompt; for a batch one for all, one for each or a list
    for each. Raises BadField.
    """
    if given is None or given == "" or given == []:
        return []
    if isinstance(given, str):
        images.count(count, _FIELD)
        return [[images.one(given, _FIELD, is_bare=True)]] * count
    assert isinstance(given, list)  # the field has no other kind
    if not is_batch:
        images.count(len(given), _FIELD)
        return [images.sent(given, _FIELD, is_bare=True)]
    if len(given) != count:
        raise BadField(_FIELD, f"has {len(given)} entries for {count} prompts")
    lists = [one if isinstance(one, list) else [] if one is None else [one] for one in given]
    images.count(sum(map(len, lists)), _FIELD)
    found = []
    for index, (own, entries) in enumerate(zip(given, lists, strict=True)):
        if isinstance(own, list):
            found.append(images.sent(entries, f"{_FIELD}.{index}", is_bare=True))
        else:
            found.append([images.one(one, f"{_FIELD}.{index}", is_bare=True) for one in entries])
    return found if any(found) else []
