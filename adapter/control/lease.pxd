from adapter.core.residency.usage cimport Usage

cimport cython

cdef int _NEW, _HELD, _ABANDONED, _ENDED

cdef class Leases:
    cdef public long abandoned, begun, ended
    cdef public bint is_paused
    cdef public object failed, became_idle
    cdef public dict arriving
    cdef long _max_abandoned
    cdef dict _drained

    cpdef Lease of(self, Usage record)
    cpdef arrives(self, Lease lease, refuse)
    cpdef has_ended(self, Lease lease)
    cpdef was_last(self, Usage record)

cdef class Lease:
    cdef public Usage record
    cdef public int state
    cdef double _begun
    cdef Leases _leases

    cpdef bint is_lost(self)
    cpdef bint is_held(self)
    @cython.locals(record=Usage)
    cpdef begin(self, now=*)
    cpdef arrives(self, refuse)
    cpdef abandon(self)
    @cython.locals(record=Usage, leases=Leases)
    cpdef end(self, error=*, now=*)
