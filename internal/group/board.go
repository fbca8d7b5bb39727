package group

import (
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// Health is what the ranks of a group show each other of their lives. None of its methods
// waits for another rank, and all may be called by several goroutines, also after Release of
// a [Board]: then nothing is to be seen.
type Health interface {
	// Begun returns the number of the last call that rank r has begun. It may be late, but
	// not for a rank that is seen to have closed, nor beside a report that is seen.
	Begun(r int) uint64
	// Closed reports whether rank r has closed the group.
	Closed(r int) bool
	// Close shows the others that this rank has closed.
	Close()
	// Publish tells the group why it has ended, unless it was told before.
	Publish(r Report)
	// Reported returns what was published first.
	Reported() (Report, bool)
	// Heard is Reported, perhaps sooner: what ranks have begun beside the report may not be seen
	// yet.
	Heard() (Report, bool)
}

// Board is what the ranks of a group show each other beside their data. [Memory] is one in
// memory that they share, [Sockets] one for ranks on any machines.
type Board interface {
	Health
	// Post shows the header of this rank's next call. If compared is false the rank does not
	// compare the call. Calls of Post are in the order of their numbers.
	Post(h *backend.Header, compared bool)
	// Compare compares the calls up to number upTo, as far as every rank has posted them. It
	// returns the number of the last call that is compared, and the first difference. A rank
	// that is far ahead of another (1024 calls) may miss one. It may take a while until Compare
	// has seen a call that is posted: ask again.
	Compare(upTo uint64) (uint64, *Difference)
	// Note shows a note of at most NoteBytes in a round, from 1; Noted returns that of a rank
	// once it is there, filled up with zeros. A rank shows its note of a round after it has
	// read those of the round before, and notes of the round before that may be gone then.
	Note(round uint64, note []byte)
	Noted(r int, round uint64) ([]byte, bool)
	// Leave counts a rank that closes a group which is well, and waits for the others no
	// longer than limit. It reports whether all leave together, the same on every rank.
	Leave(limit time.Duration) bool
	// Release gives the board up on this rank.
	Release() error
}

// NoteBytes is the size of a note on a Board.
const NoteBytes = 512
