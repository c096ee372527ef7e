# SPDX-License-Identifier: Apache-2.0
"""Named modules and global steering: kept by a front end, and turned into a request's own program when it is admitted.

Nothing here reaches the engine. A request holds the content of the modules that it names, so a module that is replaced
or deleted lives on for the requests that run with it, and engines, however many, need no copy of the registry.
"""
