# SPDX-License-Identifier: Apache-2.0
import doctest

from bertjax.data.corpus import prose

DOC = """Return the :class:`sum` of **all** the ``numbers`` that are
    in the list, as in `the guide <http://x.org>`_.

    Details
    -------
    - The first bullet is a sentence that
      goes on in the next line.
    - short

    .. note:: This is a note that is kept as it is prose.

    .. code-block:: python

        for the sake of it this is in a block of code and goes.

    For example this is written like this::

        the code is in the block and it is not kept here.

    >>> total([1, 2])
    3 is the output and it has to be dropped too.

    ```
    the fenced code is not to be kept in the text either.
    ```

    | a table | is | not | the | prose |

    Args:
      numbers: The numbers that are to be added, in any order.
    """


def test_prose_is_kept_and_markup_is_not():
    assert prose.prose(DOC) == [
        "Return the sum of all the numbers that are in the list, as in the guide.",
        "The first bullet is a sentence that goes on in the next line.",
        "This is a note that is kept as it is prose.",
        "For example this is written like this:",
        "The numbers that are to be added, in any order.",
    ]


def test_examples():
    done = doctest.testmod(prose)
    assert done.attempted and not done.failed
