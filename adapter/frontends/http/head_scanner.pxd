cimport cython

cdef dict _USUAL, _KEPT

cdef class Scanned:
    cdef public bytes method, target
    cdef public dict fields
    cdef public list lines
    cdef public Py_ssize_t length

@cython.locals(lines=list, count=Py_ssize_t, fields=dict, line=bytes, key=bytes, value=bytes, length=bytes, head=Scanned)
cpdef Scanned scan(bytes raw)
@cython.locals(name=bytes, value=bytes, key=bytes)
cdef tuple _field(bytes line)
cdef bytes _in_lower_case(bytes name)
