package backendtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

// RunRank is [Run] for one rank of a job of size processes on one machine, each of which calls it
// with the same options. Their New gives a Group of the rank's own communicator alone. notes is an
// empty directory of the job: by files in it scenarios tell ranks what the others do. RunRank
// returns the first failure: a process that ends with it ends the others, which would wait for it.
func RunRank(o Options, size int, notes string) error {
	s := newSuite(o)
	s.notes = directory(notes)
	for _, c := range scenarios {
		if size < c.atLeast {
			continue
		}
		if err := s.try(c, size); err != nil && !errors.As(err, new(errSkip)) {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// notes are what scenarios tell ranks beside the communicators, each once.
type notes interface {
	Set(ctx context.Context, key string, text []byte) error
	// Get waits for a note.
	Get(ctx context.Context, key string) ([]byte, error)
}

// directory has each note in a file, since ranks that are processes share nothing else.
type directory string

// lookTime is between two looks for a note.
const lookTime = time.Millisecond

func (d directory) path(key string) string { return filepath.Join(string(d), url.PathEscape(key)) }

// Set implements notes.
func (d directory) Set(_ context.Context, key string, text []byte) error {
	whole := d.path(key)
	if err := os.WriteFile(whole+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(whole+".new", whole)
}

// Get implements notes.
func (d directory) Get(ctx context.Context, key string) ([]byte, error) {
	for {
		text, err := os.ReadFile(d.path(key))
		if !errors.Is(err, os.ErrNotExist) {
			return text, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(lookTime):
		}
	}
}

// note returns the key of a note among the ranks of the group that was made last.
func (s *suite) note(about string, rank int) string {
	return fmt.Sprintf("backendtest/%d/%s/%d", s.groups, about, rank)
}

// tell leaves a rank's note for the others, beside the communicators.
func (s *suite) tell(about string, rank int, numbers ...int64) error {
	text, err := json.Marshal(numbers)
	if err != nil {
		return err
	}
	return s.notes.Set(context.Background(), s.note(about, rank), text)
}

// hear waits for a rank's note. That a scenario is stuck is found out elsewhere.
func (s *suite) hear(about string, rank int) (numbers []int64, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*s.limit)
	defer cancel()
	text, err := s.notes.Get(ctx, s.note(about, rank))
	if err != nil {
		return nil, fmt.Errorf("rank %d says nothing of %s: %w", rank, about, err)
	}
	return numbers, json.Unmarshal(text, &numbers)
}
