package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/bench/peers"
	"github.com/euryale-ml/euryale/internal/bench"
)

// besidePeer measures in turns with another library's program.
func (b *benchCmd) besidePeer(ctx context.Context, s *streams) (err error) {
	if b.Rounds < 1 {
		return usageError{fmt.Errorf("bench: %d rounds: there must be at least 1", b.Rounds)}
	}
	c, _, err := b.prepare(b.N, true)
	if err != nil {
		return err
	}
	program, err := peers.Prepare(ctx, b.Peer, b.N, c, b.Backend == "tcp")
	if err != nil {
		return usageError{fmt.Errorf("bench: %w", err)}
	}
	defer func() { err = errors.Join(err, program.Close()) }()
	ours := map[int]bench.Result{}
	pairs, err := bench.Turns(b.Rounds, func(which int) (map[int]float64, error) {
		measure := program.Run
		if which == 1 {
			measure = func(ctx context.Context) ([]bench.Result, error) {
				return b.oneRound(ctx, s)
			}
		}
		results, err := measure(ctx)
		times := map[int]float64{}
		for _, r := range results {
			times[r.Bytes] = r.P50Micros
			if which == 1 {
				ours[r.Bytes] = r
			}
		}
		return times, err
	})
	if err != nil {
		return err
	}
	return b.writePairs(s, pairs, ours)
}

// oneRound measures ours once, in processes.
func (b *benchCmd) oneRound(ctx context.Context, s *streams) ([]bench.Result, error) {
	round := *b
	round.JSON = true
	var out bytes.Buffer
	if err := round.asProcesses(ctx, &streams{out: &out, err: s.err}); err != nil {
		return nil, err
	}
	return bench.ReadJSON(&out)
}

// writePairs writes the medians over the rounds; what else a line has is of the last round.
func (b *benchCmd) writePairs(s *streams, pairs []bench.Pair, ours map[int]bench.Result) error {
	if !b.JSON && len(pairs) > 0 {
		engine := ours[pairs[0].Bytes].Backend
		if _, err := fmt.Fprintf(s.out, "#%11s %11s %11s %7s\n#%11s %11s %11s\n", "size", engine,
			b.Peer, "ratio", "(bytes)", "(us)", "(us)"); err != nil {
			return err
		}
	}
	for _, p := range pairs {
		r := ours[p.Bytes]
		r.Peer, r.PeerMicros, r.P50Micros, r.Ratio = b.Peer, p.Micros[0], p.Micros[1], p.Ratio
		var err error
		if b.JSON {
			err = r.WriteJSON(s.out)
		} else {
			_, err = fmt.Fprintf(s.out, " %11d %11.2f %11.2f %7.3f\n", p.Bytes, r.P50Micros,
				r.PeerMicros, r.Ratio)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
