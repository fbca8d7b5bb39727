package observe

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"io"
)

// Credential returns what clients of a job with a token show to read its metrics. The token, by
// which one can join the job, cannot be found from it.
func Credential(token string) string {
	h := hmac.New(sha256.New, []byte(token))
	io.WriteString(h, "euryale metrics")
	return hex.EncodeToString(h.Sum(nil))
}
