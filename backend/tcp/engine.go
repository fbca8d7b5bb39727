package tcp

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/internal/hosted"
)

// engine moves the data of a group over its connections, one call at a time.
type engine struct {
	*hosted.Comm
	links []*link // by rank; nil for this one
	wait  wait
	relay relay
	heads []header         // of the current call, by rank
	terms []backend.Buffer // scratch of a reduction
	// for a sum of branches: the terms of each operand of each rank, by rank and in one list
	branches [][]int
	sizes    []int
	room     []byte // where operands of other ranks arrive
	sum      []byte // where sums for another rank are made
}

var _ hosted.Engine = (*engine)(nil)

type header = [backend.HeaderSize]byte

// Close implements [hosted.Engine].
func (e *engine) Close(bool) error {
	err := e.Board.Release() // first: a rank that loses a connection asks the board why
	for _, l := range e.links {
		if l != nil {
			err = errors.Join(err, l.close())
		}
	}
	return err
}
