"""Programs of others that test the MCP endpoint. They run on Node.js, which is told to leave no cache behind."""

import os

os.environ["NODE_DISABLE_COMPILE_CACHE"] = "1"
