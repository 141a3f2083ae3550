package boundary

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Tier is where a moved boundary lives.
type Tier string

// The tiers.
const (
	TierDevice Tier = "device" // where it was put, as a reference
	TierHost   Tier = "host"   // in pooled host buffers
	TierDisk   Tier = "disk"   // in one file each
)

// Codec is how a moved boundary's float32 and float64 values are written.
type Codec string

// The codecs. Rounding is to nearest, ties to even; NaN and infinities are kept; what is too large becomes infinite.
const (
	CodecRaw  Codec = "raw"
	CodecFP16 Codec = "fp16"
	CodecBF16 Codec = "bf16"
)

// Spec configures a [Store]. [DefaultSpec] gives the defaults.
type Spec struct {
	Tier  Tier  `json:"tier"`
	Codec Codec `json:"codec"`
	// Dir is the folder under which the disk tier makes its own; "" is the system's folder for temporary files.
	Dir string `json:"dir"`
	// MaxBytes is a hard cap on the bytes of the tier: those referenced (device), encoded (host) or in files (disk). 0 is none.
	MaxBytes int64 `json:"max_bytes"`
	// PoolBuffers keeps returned buffers for reuse. Without it each is freed.
	PoolBuffers bool `json:"pool_buffers"`
	// Async does moves and loads on Workers goroutines.
	Async   bool `json:"async"`
	Workers int  `json:"workers"`
	// Pin asks for page-locked host buffers where [Options] has an allocator for them.
	Pin bool `json:"pin"`
	// TimeoutSeconds bounds each wait whose context has no deadline.
	TimeoutSeconds float64 `json:"timeout_seconds"`
	// FileDelaySeconds is waited before each piece of a file that is written or read: a slow disk, for tests.
	FileDelaySeconds float64 `json:"file_delay_seconds"`
}

// DefaultSpec is the device tier without a codec, pooling, two workers if made asynchronous, waits of at most ten minutes.
func DefaultSpec() Spec {
	return Spec{Tier: TierDevice, Codec: CodecRaw, PoolBuffers: true, Workers: 2, TimeoutSeconds: 600}
}

// ParseSpec reads a JSON object over the defaults and validates it. ErrValue for anything else, naming the field.
func ParseSpec(text string) (Spec, error) {
	spec := DefaultSpec()
	dec := json.NewDecoder(bytes.NewReader([]byte(text)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&spec); err != nil {
		return Spec{}, errs.E(errs.ErrValue, "store spec: %w", err)
	}
	return spec, spec.Validate()
}

const maxWorkers = 16

// Validate gives ErrValue naming the first field that is not allowed, and what is.
func (s Spec) Validate() error {
	bad := func(field string, value any, allowed string) error {
		return errs.E(errs.ErrValue, "store spec: %s is %v; allowed: %s", field, fmt.Sprintf("%#v", value), allowed)
	}
	switch s.Tier {
	case TierDevice, TierHost, TierDisk:
	default:
		return bad("tier", string(s.Tier), `"device", "host", "disk"`)
	}
	switch s.Codec {
	case CodecRaw, CodecFP16, CodecBF16:
	default:
		return bad("codec", string(s.Codec), `"raw", "fp16", "bf16"`)
	}
	if s.MaxBytes < 0 {
		return bad("max_bytes", s.MaxBytes, "0 (no cap) or more")
	}
	if s.Workers < 1 || s.Workers > maxWorkers {
		return bad("workers", s.Workers, fmt.Sprintf("1 to %d", maxWorkers))
	}
	if !(s.TimeoutSeconds > 0 && s.TimeoutSeconds <= 86400) {
		return bad("timeout_seconds", s.TimeoutSeconds, "more than 0, at most 86400")
	}
	if !(s.FileDelaySeconds >= 0 && s.FileDelaySeconds <= 60) {
		return bad("file_delay_seconds", s.FileDelaySeconds, "0 to 60")
	}
	return nil
}

func (s Spec) timeout() time.Duration { return time.Duration(s.TimeoutSeconds * float64(time.Second)) }

// moves says whether Move and Load do anything.
func (s Spec) moves() bool { return s.Tier != TierDevice || s.Codec != CodecRaw }
