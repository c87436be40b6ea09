"""Writes the C source of `colibri._native` from the declarations in the .cdef files."""

import sys
from pathlib import Path

import cffi


def main(output: str, *declarations: str) -> None:
    ffi = cffi.FFI()
    for path in declarations:
        ffi.cdef(Path(path).read_text(encoding="utf-8"))
    ffi.set_source("colibri._native", '#include "colibri.h"', py_limited_api=True)
    ffi.emit_c_code(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
