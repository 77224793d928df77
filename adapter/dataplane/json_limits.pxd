cimport cython

cdef Py_ssize_t _FEW, _KEY_BYTES, _SHORT_BYTES
cdef int _BACKSLASH

@cython.locals(part=bytes, size=Py_ssize_t, levels=Py_ssize_t)
cpdef check_whole(max_unpacked, bytes body, json_bytes)
@cython.locals(at=Py_ssize_t, end=Py_ssize_t, text=bytes)
cdef bint _are_small(bytes part, Py_ssize_t most) except -1
