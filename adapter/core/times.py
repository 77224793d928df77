"""Hold all time constants of core and control, each with its reason.

What an operator may want to change is a setting instead: the time limits of a load and of an
inference, the wait of a call for its model of a store.
"""

# -- looks and tries ----------------------------------------------------------------------------

# Between two looks at Triton, at memory or at a process while somebody waits and nothing reports a
# change. A look costs some milliseconds. Durations below it count as equal.
POLL_SECONDS = 0.1

# Between two rounds of housekeeping, since Triton's index takes time in proportion to its models;
# before a wanted model is tried again, doubled with each failure; and until a caller that was
# turned away may come again.
PAUSE_SECONDS = 2.0

# The longest pause between two tries of a wanted model: a folder that was mended, or memory that
# somebody else has freed, is found within a minute.
LONGEST_PAUSE_SECONDS = 60.0

# A load that has just failed is not repeated within this time. Fifty callers who come together get
# the one failure of the files. A model that may have ended Triton comes back after this pause,
# which doubles each time.
FAILURE_SECONDS = 5.0

# What was so lately still holds: a caller who used a model will use it again, and an eviction that
# freed too little for a package would do so again. Neighbours in memory come and leave within
# minutes.
RECENT_SECONDS = 30.0

# -- waits for others ---------------------------------------------------------------------------

# For what comes before a load. That is a restart of Triton (it took 1 to 16 s), or models in use
# that can be evicted once they are idle. Or it is the loads of all other models, and then the turns
# of all suspects together. By default a call waits 55 s for its model, and most of that should
# remain for the load itself. The situations of blame.py were played with this figure.
PATIENCE_SECONDS = 10.0

# For memory to come back: kernel and driver free what an unloaded model or an exited Triton had
# within seconds. After that a platform is better served by 507 than by waiting, since it can unload
# another model. Readings show a change after 3 s at the latest (Triton's metrics): if none has come
# by then, their source has failed, and the ledger goes by its own figures. A load whose size is a
# guess holds up the next guess for this time: most loads end within seconds, and one that hangs
# must not block the others. Once it has held one up in vain, it holds up no other.
MEMORY_SECONDS = 5.0

# -- Triton and its processes -------------------------------------------------------------------

# After this a load or an unload that Triton has not finished hangs: another load may take its
# thread, and the processes of an unload are killed. Few loads that work take longer. A slow one is
# not ended by this: the time limit of a load is a setting.
HANG_SECONDS = 30.0

# For Triton to notice that a process of a model is gone, be it killed or lost during a load: since
# 25.09 that took it 5 to 7 s, and more on a busy machine.
KILLED_SECONDS = 25.0

# For processes that a model started to end by themselves, once Triton has unloaded it. Also for a
# load that is about to end to do so: Triton never answers one that is killed as it ends.
LINGER_SECONDS = 3.0

# For loads that a stop of the adapter breaks off to be undone: of the 30 s from SIGTERM to SIGKILL
# the drain and Triton's stop take up to 22.
UNDO_SECONDS = 4.0

# -- which model ended Triton (blame.py) --------------------------------------------------------

# The turn of a suspect ends this long after its load: most models that end Triton do so in their
# load or at their first requests. For as long a new model is evicted only if nothing else helps:
# it has not served those that it was loaded for, and models must not evict each other in turn.
TURN_SECONDS = 1.0

# A load that took longer is not charged: what ends Triton from outside often meets long loads.
LONGEST_CHARGED_LOAD_SECONDS = 60.0

# A model that was given up stays unloaded for this time, unless a person loads it by V2.
GIVEN_UP_SECONDS = 600.0

# All charges are forgotten after this time without an exit. A killer may be called once an hour.
CHARGE_SECONDS = 86400.0
