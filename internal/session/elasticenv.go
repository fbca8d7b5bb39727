package session

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/rendezvous"
)

// JoinElastic makes this process take part in the elastic job that its launcher's variables say.
func JoinElastic(ctx context.Context, backends func() []backend.Backend) (*Elastic, error) {
	text := env.Elastic.Text(os.Getenv)
	if text == "" {
		return nil, errors.New("euryale: this process is in no elastic job: start the program " +
			"with euryale run --elastic")
	}
	e, err := elastic.ReadEnv(text)
	if err != nil {
		return nil, fmt.Errorf("euryale: %w", env.Elastic.Wrong(text, err))
	}
	job, err := rendezvous.ReadEnv(env.Lookup(os.Environ()))
	if err != nil {
		return nil, fmt.Errorf("euryale: %w", err)
	}
	register, err := rendezvous.OpenRegister(ctx, e.Addr, job, int(e.Process))
	if err != nil {
		return nil, fmt.Errorf("euryale: %w", err)
	}
	return NewElastic(ElasticConfig{ID: e.Process, Limits: e.Limits, First: e.FirstView(),
		Register: register, Env: job, Host: e.Host, Seat: e.Seat, Backends: backends}), nil
}
