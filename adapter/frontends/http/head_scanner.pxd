cdef class Scanned:
    cdef public bytes method, target
    cdef public dict fields
    cdef public list lines
    cdef public Py_ssize_t length

cdef bytes _in_lower_case(bytes name)
