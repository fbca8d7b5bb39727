// Package elastic decides how a job goes on when it loses a rank or gains one, without a clock,
// a socket or a thread. [docs/elastic.md] is its manual.
//
// A [Process] is one process of the job. It is a pure state machine: events go in, actions come
// out, and the same events give the same actions. What carries them out is the driver's.
//
//	            Decided, with this process          Connected             CaughtUp
//	Gathering ------------------------------> Connecting -----> CatchingUp -----> Training
//	  ^   ^  |                                    |                 |                |
//	  |   |  | Decided, without it                |     Broken      |                |
//	  |   |  +-----------> Stopped                +-----------------+----------------+
//	  |   |                                       |                        Admits    |
//	  |   +---------------------------------------+----------------------------------+
//	  replacement
//
// # Steps
//
// A step changes the state of a training at once, or not at all. A member first computes and
// exchanges gradients, then it has [Reduced] the step, then it passes a barrier of all members, and
// only then it applies the step. Hence the first invariant:
//
//	If a member has applied step s, then every member of its generation has reduced s.
//
// So members never differ by more than the step that was under way, and one that is behind needs
// nothing from the others to catch up. It applies what it has. Nothing is ever undone.
//
// # Generations
//
// A generation is a group of ranks that does not change. Its end is a decision that is taken once,
// in a register that outlives the members: the [View] of the next generation. Every member that
// takes part in the decision has stopped before, and has posted its [Position]. All derive from
// the view, and from nothing else, which step comes next: see [View.Next].
//
// # Parts
//
// Members may have parts of the model ([View].Parts), as tensor-parallel ranks do: they form whole
// replicas then, the state is whole if there is one of each part, and a process has its part for
// life. Members that are in no replica stop, and others come in their place.
//
// # Faults of members that live
//
// A process also posts which others it does not reach, and whom it blames. The members of the next
// generation all reach each other. Members that have failed together without a step, twice in a
// row, are never together again: the one that most of the others blame is left out. One with the
// state of the training is always kept.
package elastic
