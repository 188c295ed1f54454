"""The images of prompts on their way to followers: sent once for all live samples of a prompt."""

from __future__ import annotations

from ..media.images import Images
from ..media.wire import images_bytes, images_from


class SentImages:
    """The controller's end: the numbers of the images that followers have, by the sequences that use them."""

    def __init__(self) -> None:
        self._numbers: dict[Images, int] = {}
        self._users: dict[str, Images] = {}  # by id of a live sequence
        self._num_users: dict[Images, int] = {}
        self._num_sent = 0

    def introduce(self, id: str, images: Images) -> tuple[int, bytes]:
        """Count a sequence as a user. Returns the number of its images, from 1, and their bytes where they are new."""
        self._users[id] = images
        self._num_users[images] = self._num_users.get(images, 0) + 1
        if images in self._numbers:
            return self._numbers[images], b""
        self._num_sent += 1
        self._numbers[images] = self._num_sent
        return self._num_sent, images_bytes(images)

    def free(self, id: str) -> None:
        """Count a sequence no longer; followers forget images without users by themselves."""
        if (images := self._users.pop(id, None)) is not None:
            self._num_users[images] -= 1
            if not self._num_users[images]:
                del self._num_users[images], self._numbers[images]


class ReceivedImages:
    """A follower's end."""

    def __init__(self) -> None:
        self._images: dict[int, Images] = {}
        self._users: dict[str, int] = {}
        self._num_users: dict[int, int] = {}

    def of(self, number: int, data: bytes) -> Images:
        """Return the images of this number, which come with their bytes the first time."""
        if data:
            self._images[number] = images_from(data)
        return self._images[number]

    def use(self, id: str, number: int) -> None:
        """Count a sequence as a user."""
        self._users[id] = number
        self._num_users[number] = self._num_users.get(number, 0) + 1

    def free(self, id: str) -> None:
        """Count a sequence no longer, and forget images without users."""
        if (number := self._users.pop(id, None)) is not None:
            self._num_users[number] -= 1
            if not self._num_users[number]:
                del self._num_users[number], self._images[number]
