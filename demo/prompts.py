# SPDX-License-Identifier: Apache-2.0
"""Prompts of the demo.

The steering vector of a site is the mean stream over the tokens of CODE minus the mean over those of PROSE. NEUTRAL
prompts are words that occur in both; without steering the model continues some of them as code and some as prose.
"""

from __future__ import annotations

CODE: tuple[str, ...] = (
    "def area(width, height):\n    return width * height\n",
    "import os\nimport sys\nfrom pathlib import Path\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "for index, row in enumerate(rows):\n    if not row:\n        continue\n",
    "with open(path) as handle:\n    lines = handle.readlines()\n",
    "try:\n    value = int(text)\nexcept ValueError:\n    value = None\n",
    "result = [x * x for x in numbers if x > 0]\n",
    "if name not in cache:\n    cache[name] = load(name)\nreturn cache[name]\n",
    "while queue:\n    node = queue.pop()\n    visit(node)\n",
    "@property\ndef length(self):\n    return len(self._data)\n",
    "def test_empty(self):\n    self.assertEqual(parse(''), [])\n",
    "parser = argparse.ArgumentParser()\nparser.add_argument('--name', default=None)\n",
    "async def fetch(url):\n    async with Session() as session:\n        return await session.get(url)\n",
    "x = np.zeros((rows, columns))\ny = x.reshape(-1)\n",
    "raise TypeError('expected str, got %r' % type(value))\n",
    "settings = {\n    'host': 'localhost',\n    'port': 8080,\n}\n",
    "def __repr__(self):\n    return f'{self.__class__.__name__}({self.value})'\n",
    "total = sum(item.price for item in order.items)\nassert total >= 0\n",
    "lock = threading.Lock()\nwith lock:\n    counter += 1\n",
    "class NotFound(Exception):\n    pass\n\n\nclass Conflict(Exception):\n    pass\n",
    "match = re.match(r'(\\w+)=(\\d+)', line)\nif match is None:\n    return {}\n",
    "if __name__ == '__main__':\n    sys.exit(main(sys.argv[1:]))\n",
    "a, b = b, a % b\nif b == 0:\n    return a\n",
    "log = logging.getLogger(__name__)\nlog.debug('started with %s', options)\n",
)

PROSE: tuple[str, ...] = (
    "The server keeps a list of all the clients that are connected at the moment.",
    "When the user opens a new window, the program asks for a name and a password.",
    "This chapter explains how to install the package and how to set it up for the first time.",
    "You should read the whole guide before you change anything in the configuration.",
    "A queue holds the messages that have not yet been delivered to their readers.",
    "If the file does not exist, it will be created in the folder that you have chosen.",
    "In most cases the default works well, and there is no need to think about it.",
    "Each of these methods has its own advantages, which are described below in more detail.",
    "The number of points must be large enough for the estimate to be useful.",
    "Note that the order of the elements may differ between one run and the next.",
    "For more information about how the system works, see the section on its design.",
    "There are two ways to solve this problem, and both of them take some time.",
    "After the update, all the old records remain, but they can no longer be changed.",
    "It is often a good idea to make a copy of the data before you begin.",
    "The second part of the tutorial shows what happens when several users work at once.",
    "Because the network is slow, the reply may arrive long after the request was sent.",
    "An account that has not been used for a year is closed, and its owner is told so.",
    "The matrix is stored by rows, so that reading along a row is faster than down a column.",
    "Some of the older versions do not support this feature, although most of them do.",
    "We recommend that you test the new release with your own data as soon as you can.",
    "As a result, the two lines meet at a point that lies outside of the picture.",
    "Only the person who created the group is allowed to remove it again.",
    "The description should say what the object is for and who is expected to use it.",
    "Before this release, a warning was shown only the first time that the problem occurred.",
)

NEUTRAL: tuple[str, ...] = (
    "The",
    "for",
    "Return",
    "name",
    "If the value is",
    "value",
    "is",
    "to",
)
