"""The service over a scripted engine in a process of its own: `DATA_DIR PORT_FILE`."""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.server.scripted import running


async def main(data_dir: Path, port_file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), data_dir=data_dir) as service:
            await asyncio.to_thread(port_file.write_text, str(service.port))
            await service.exit_code


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
