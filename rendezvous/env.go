package rendezvous

import (
	"fmt"
	"time"
)

// Env is what a rank must know to join its job. [ReadEnv] fills it in.
type Env struct {
	// Launcher says whose variables were read, for messages.
	Launcher string
	// Job identifies the job, the same on all its ranks.
	Job string
	// Rank, Size, LocalRank, LocalSize and Node are those of World. A Node of -1
	// is not known: [Join] then finds out.
	Rank, Size, LocalRank, LocalSize, Node int
	// Addr and Port are where rank 0 serves the store when the ranks are on
	// several machines.
	Addr string
	Port int
	// Token is the secret that the ranks share; "" where none was given.
	Token string
	// Timeout bounds every wait for another rank.
	Timeout time.Duration
}

// check finds what no job can have.
func (e Env) check() error {
	switch {
	case e.Size < 1:
		return fmt.Errorf("rendezvous: a world of %d ranks: it needs at least 1", e.Size)
	case e.Rank < 0 || e.Rank >= e.Size:
		return fmt.Errorf("rendezvous: rank %d is out of range: there are %d ranks, 0 to %d", e.Rank, e.Size, e.Size-1)
	case e.LocalSize < 1 || e.LocalSize > e.Size:
		return fmt.Errorf("rendezvous: rank %d: %d local ranks are not possible among %d ranks", e.Rank, e.LocalSize, e.Size)
	case e.LocalRank < 0 || e.LocalRank >= e.LocalSize:
		return fmt.Errorf("rendezvous: local rank %d is out of range: there are %d local ranks, 0 to %d", e.LocalRank, e.LocalSize, e.LocalSize-1)
	case e.Timeout <= 0:
		return fmt.Errorf("rendezvous: rank %d: a timeout of %v: it must be positive", e.Rank, e.Timeout)
	}
	return nil
}
