package lowlatency

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// gather gives every rank the note of every rank, over inner: the parts that Split makes
// have no store, and inner compares and ends this as it does every call.
func gather(inner backend.Communicator, note []byte) ([][]byte, error) {
	lengths, err := allGather(inner, binary.LittleEndian.AppendUint64(nil, uint64(len(note))))
	if err != nil {
		return nil, err
	}
	longest := 1 // nothing would not be exchanged
	for _, n := range lengths {
		longest = max(longest, int(binary.LittleEndian.Uint64(n)))
	}
	padded := make([]byte, longest)
	copy(padded, note)
	notes, err := allGather(inner, padded)
	if err != nil {
		return nil, err
	}
	for r, n := range lengths {
		notes[r] = notes[r][:binary.LittleEndian.Uint64(n)]
	}
	return notes, nil
}

// allGather exchanges notes of one length, in memory of the device: inner may take
// no other, or complain of it.
func allGather(inner backend.Communicator, note []byte) (notes [][]byte, err error) {
	dev, P, n := inner.Device(), inner.Size(), len(note)
	memory, err := dev.Alloc(n * (P + 1))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Free(memory)) }()
	q := dev.Default()
	mine, all := memory.Slice(P*n, (P+1)*n), memory.Slice(0, P*n)
	if err := q.Move(mine, backend.Of(note)); err != nil {
		return nil, err
	}
	what := backend.Collective{Kind: backend.AllGather, Origin: &backend.Origin{Purpose: backend.ForConnect}}
	if err := backend.Run(inner, what, all, mine); err != nil {
		return nil, err
	}
	bytes := make([]byte, P*n)
	if err := errors.Join(q.Move(backend.Of(bytes), all), drain(context.Background(), q)); err != nil {
		return nil, err
	}
	for r := range P {
		notes = append(notes, bytes[r*n:(r+1)*n])
	}
	return notes, nil
}

// gatherAll is gather for values.
func gatherAll[T any](inner backend.Communicator, mine T) ([]T, error) {
	note, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	notes, err := gather(inner, note)
	if err != nil {
		return nil, err
	}
	all := make([]T, len(notes))
	for r, note := range notes {
		if err := json.Unmarshal(note, &all[r]); err != nil {
			return nil, fmt.Errorf("rank %d sent what cannot be read: %w", r, err)
		}
	}
	return all, nil
}

// refusal is why the ranks do not go on together, the same on every rank; unlike
// other errors it leaves inner as good as before.
type refusal string

func (r refusal) Error() string { return string(r) }

// vote returns a refusal, on every rank, if any of them has a problem.
func vote(inner backend.Communicator, problem error) error {
	text := ""
	if problem != nil {
		text = problem.Error()
	}
	all, err := gatherAll(inner, text)
	if err != nil {
		return errors.Join(err, problem)
	}
	for r, text := range all {
		if text != "" {
			return refusal(fmt.Sprintf("rank %d: %s", r, text))
		}
	}
	return nil
}
