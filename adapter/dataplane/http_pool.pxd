from adapter.dataplane.http_connection cimport Connection

cimport cython

cdef class Pool:
    cdef object _faults, _seconds, _keep_seconds, _sweeper, _all_lost
    cdef public object address, answered_nothing
    cdef readonly set connections
    cdef readonly list unused
    cdef bint _is_closed

    @cython.locals(connection=Connection)
    cpdef idle(self)
    cpdef free(self, connection)
