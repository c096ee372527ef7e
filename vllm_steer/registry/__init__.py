# SPDX-License-Identifier: Apache-2.0
"""Named modules and global steering.

The registry belongs to the front end. When a request is admitted, the content of its modules and of global steering
becomes part of the request's program. Engines therefore need no copy of the registry, and replacing or deleting a
module does not affect running requests.
"""
