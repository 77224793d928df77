cimport cython

cdef dict _USUAL

cdef class Scanned:
    cdef public bytes method, target
    cdef public dict fields
    cdef public list lines
    cdef public Py_ssize_t length

@cython.locals(lines=list, count=Py_ssize_t, fields=dict, line=bytes, name=bytes, key=bytes, value=bytes, length=bytes, head=Scanned)
cpdef Scanned scan(bytes raw)
cdef bytes _in_lower_case(bytes name)
